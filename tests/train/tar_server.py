"""The tars of a folder on a small server, for runs that stream: a fake, in place of XRootD."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import ClassVar

from dataset.transfer.journal import CHUNK
from tests.dataset.small_server import Handler, running
from tests.dataset.tars import TRAIN

Misbehave = Callable[[Handler], bool]


class FolderHandler(Handler):
    """Serves the files of a folder, with ranges."""

    files: ClassVar[dict[str, bytes]] = {}

    def serve(self) -> None:
        content = self.files.get(self.path.lstrip("/"))
        if content is None:
            answer(self, 404)
            return
        self.content = content
        with suppress(ConnectionError):  # the fetcher was killed
            super().serve()


def answer(handler: Handler, status: int) -> bool:
    """Answers with nothing but a status."""
    handler.send_response(status)
    handler.send_header("Content-Length", "0")
    handler.end_headers()
    return True


def first_byte(handler: Handler) -> int:
    """Where the range of a request begins."""
    return int(handler.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])


def hold_back(chunk: int, is_open: Event, end: int | None = None) -> Misbehave:
    """The training tar's bytes from one MiB on, to another, come only when the gate is open."""

    def misbehave(handler: Handler) -> bool:
        place = first_byte(handler) // CHUNK
        if handler.path == f"/{TRAIN}" and chunk <= place < (end or place + 1):
            is_open.wait()
        return False

    return misbehave


@contextmanager
def serving_folder(
    folder: Path, misbehave: Misbehave = lambda handler: False
) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """(address, the requests so far) of the files of a folder."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    seen: list[dict[str, str]] = []
    faults = staticmethod(misbehave)
    with running(FolderHandler, files=files, misbehave=faults, seen=seen) as url:
        yield url, seen
