"""The index of a tar on a small server, that of the same bytes on the disk, and faults between."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from dataset import known_archives
from dataset.archive.index import build_index
from dataset.federation.lookup import Options
from dataset.fetch.request import Request
from dataset.stream.index_url import IndexedUrl, IndexJob, index_url
from tests.dataset.object_fetch import FAST, NOWHERE
from tests.dataset.small_server import Handler, running
from tests.dataset.tars import (
    TRAIN,
    Tree,
    nested_bytes,
)

ROOT = Path(__file__).resolve().parents[3]
QUICK = replace(FAST, give_up_s=3.0)
Misbehave = Callable[[Handler], bool]


def make_large_tree() -> Tree:
    """About 30 MiB."""
    sizes = [300_000 + 7 * i for i in range(10)]
    return {
        f"n{c:08d}": {f"n{c:08d}_{i}.JPEG": os.urandom(size) for i, size in enumerate(sizes)}
        for c in range(10)
    }


LARGE = nested_bytes(make_large_tree())


@contextmanager
def serving_tar(
    content: bytes, name: str = TRAIN, misbehave: Misbehave = lambda handler: False
) -> Iterator[tuple[str, list[dict[str, str]]]]:
    seen: list[dict[str, str]] = []
    with running(Handler, content=content, misbehave=staticmethod(misbehave), seen=seen) as url:
        yield f"{url}/{name}", seen


def index(
    url: str, folder: Path, labels: Path | None = None, checksums: bool = False,
    options: Options = FAST, discovery: str | None = None,
) -> IndexedUrl:  # fmt: skip
    request = Request(folder, options, discovery, environ=NOWHERE)
    return index_url(IndexJob(request.parse(url), folder, labels, checksums), request)


def index_file(folder: Path, content: bytes, name: str = TRAIN, checksums: bool = False) -> bytes:
    """The index of the same bytes on the disk."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    return build_index(folder / name, checksums=checksums)[1].read_bytes()


def publish(monkeypatch: pytest.MonkeyPatch, content: bytes, md5: str = "") -> None:
    """Makes the content a published archive."""
    md5 = md5 or hashlib.md5(content).hexdigest()
    archive = known_archives.PublishedArchive(TRAIN, len(content), md5, "", 10, 100)
    monkeypatch.setattr(known_archives, "published_archives", lambda: {len(content): archive})


def first_byte(handler: Handler) -> int:
    found = re.match(r"bytes=(\d+)-", handler.headers.get("Range", ""))
    return int(found[1]) if found else 0


def list_folder(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refuse_beyond(position: int) -> Misbehave:
    def misbehave(handler: Handler) -> bool:
        if first_byte(handler) < position:
            return False
        handler.send_response(503)
        handler.send_header("Content-Length", "0")
        handler.end_headers()
        return True

    return misbehave
