"""The index of a URL is that of the file, whatever the network does, and after any kill."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from dataset import known_archives
from dataset.archive.index import build_index
from dataset.errors import CommandError, DataError, PassingError, UserError
from dataset.federation.lookup import Options
from dataset.fetch.request import Request
from dataset.own_names import part_path
from dataset.stream import forward_pass, resumable_md5
from dataset.stream.index_url import IndexedUrl, IndexJob, index_url
from dataset.stream.pass_state import read_state
from dataset.transfer.journal import CHUNK
from tests.dataset.bad_tars import BAD
from tests.dataset.director_server import federation
from tests.dataset.object_fetch import FAST, NOWHERE
from tests.dataset.small_server import Handler, running
from tests.dataset.tars import (
    TRAIN,
    VAL,
    Tree,
    flatten,
    make_tree,
    nested_bytes,
    tar_bytes,
    write_flat,
)

ROOT = Path(__file__).resolve().parents[3]
QUICK = replace(FAST, give_up_s=1.0)
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


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize(
    "content", [LARGE, tar_bytes(flatten(make_tree()))], ids=["nested", "tree"]
)
def test_the_index_is_that_of_the_file_to_the_byte(
    tmp_path: Path, content: bytes, checksums: bool
) -> None:
    expected = index_file(tmp_path / "in", content, checksums=checksums)
    with serving_tar(content) as (url, _):
        found = index(url, tmp_path / "out", checksums=checksums)
    assert found.place.read_bytes() == expected
    assert found.fetched_bytes == len(content)
    assert list_folder(tmp_path / "out") == [f"{TRAIN}.index"]


def test_a_window_smaller_than_a_class_tar_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward_pass, "WINDOW_CHUNKS", 2)
    with serving_tar(LARGE) as (url, _):
        found = index(url, tmp_path / "out", checksums=True)
    assert found.place.read_bytes() == index_file(tmp_path / "in", LARGE, checksums=True)


def test_labels_of_a_flat_tar_cost_no_second_pass(tmp_path: Path) -> None:
    tar, _ = write_flat(tmp_path / "in")
    expected = build_index(tar)[1].read_bytes()
    with serving_tar(tar.read_bytes(), VAL) as (url, seen):
        with pytest.raises(UserError, match="its labels are unknown"):
            index(url, tmp_path / "out")
        seen.clear()
        found = index(url, tmp_path / "out", labels=tmp_path / "in" / "valprep.sh")
    assert found.place.read_bytes() == expected
    assert found.fetched_bytes == 0
    assert {request["range"] for request in seen} == {"bytes=0-0"}, "only its size was asked"


def test_labels_in_the_folder_of_the_index_are_found(tmp_path: Path) -> None:
    tar, _ = write_flat(tmp_path / "in")
    expected = build_index(tar)[1].read_bytes()
    (tmp_path / "out").mkdir()
    (tmp_path / "in" / "valprep.sh").rename(tmp_path / "out" / "valprep.sh")
    with serving_tar(tar.read_bytes(), VAL) as (url, _):
        assert index(url, tmp_path / "out").place.read_bytes() == expected


def test_a_broken_label_file_is_refused_before_the_pass(tmp_path: Path) -> None:
    (tmp_path / "labels").write_text("nothing\n")
    with serving_tar(LARGE) as (url, seen):
        with pytest.raises(UserError, match="holds no labels"):
            index(url, tmp_path / "out", labels=tmp_path / "labels")
    assert seen == []


@pytest.mark.parametrize("case", BAD)
def test_a_bad_tar_is_refused_as_the_file_is(tmp_path: Path, case: str) -> None:
    make, words = BAD[case]
    content = make()
    with pytest.raises(CommandError) as of_file:
        index_file(tmp_path / "in", content)
    with serving_tar(content) as (url, _):
        with pytest.raises(CommandError, match=words) as of_url:
            index(url, tmp_path / "out")
    assert of_url.value.exit_code == of_file.value.exit_code
    assert list_folder(tmp_path / "out") == []


@pytest.mark.parametrize("has_libcrypto", [True, False])
def test_the_published_md5_is_computed_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_libcrypto: bool
) -> None:
    if not has_libcrypto:
        monkeypatch.setattr(resumable_md5, "find_libcrypto", lambda: None)
    publish(monkeypatch, LARGE)
    with serving_tar(LARGE) as (url, _):
        assert index(url, tmp_path).verified == "md5 (published)"


def test_another_md5_than_the_published_one_gives_no_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(monkeypatch, LARGE, md5="0" * 32)
    with serving_tar(LARGE) as (url, _):
        with pytest.raises(DataError, match="no index was written") as caught:
            index(url, tmp_path)
    assert caught.value.exit_code == 3
    assert list_folder(tmp_path) == []


def refuse_beyond(position: int) -> Misbehave:
    def misbehave(handler: Handler) -> bool:
        if first_byte(handler) < position:
            return False
        handler.send_response(503)
        handler.send_header("Content-Length", "0")
        handler.end_headers()
        return True

    return misbehave


@pytest.mark.parametrize("has_libcrypto", [True, False])
def test_a_pass_goes_on_where_an_earlier_one_gave_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_libcrypto: bool
) -> None:
    if not has_libcrypto:
        monkeypatch.setattr(resumable_md5, "find_libcrypto", lambda: None)
    publish(monkeypatch, LARGE)
    is_broken = True

    def misbehave(handler: Handler) -> bool:
        return is_broken and refuse_beyond(12 * CHUNK)(handler)

    with serving_tar(LARGE, misbehave=misbehave) as (url, seen):
        with pytest.raises(PassingError):
            index(url, tmp_path / "out", checksums=True, options=QUICK)
        assert list_folder(tmp_path / "out") == [f"{TRAIN}.index.trainyard-part"]
        is_broken = False
        seen.clear()
        found = index(url, tmp_path / "out", checksums=True)
    starts = [int(request["range"][6:].partition("-")[0]) for request in seen]
    assert min(start for start in starts if start) >= 10 * CHUNK
    assert found.place.read_bytes() == index_file(tmp_path / "in", LARGE, checksums=True)
    assert found.verified == ("md5 (published)" if has_libcrypto else "")
    assert list_folder(tmp_path / "out") == [f"{TRAIN}.index"]


CHILD = """
    import sys
    from pathlib import Path
    from dataset import known_archives
    from dataset.federation.lookup import Options
    from dataset.fetch.request import Request
    from dataset.stream import forward_pass
    from dataset.stream.index_url import IndexJob, index_url
    url, folder, size, md5 = sys.argv[1:]
    name = url.rpartition("/")[2]
    archive = known_archives.PublishedArchive(name, int(size), md5, "", 10, 100)
    known_archives.published_archives = lambda: {int(size): archive}
    forward_pass.SAVE_S = 0.0
    request = Request(Path(folder), Options(stall_s=60.0))
    index_url(IndexJob(request.parse(url), Path(folder), None, True), request)
"""


@pytest.mark.parametrize("num_mib", [5, 17])
def test_after_a_kill_the_pass_goes_on_and_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_mib: int
) -> None:
    if resumable_md5.find_libcrypto() is None:
        pytest.skip("no libcrypto here")
    publish(monkeypatch, LARGE)
    out, is_holding = tmp_path / "out", True

    def hold(handler: Handler) -> bool:
        while is_holding and first_byte(handler) >= num_mib * CHUNK:
            time.sleep(0.01)
        return False

    with serving_tar(LARGE, misbehave=hold) as (url, seen):
        arguments = [url, str(out), str(len(LARGE)), hashlib.md5(LARGE).hexdigest()]
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(CHILD), *arguments], cwd=ROOT
        )
        identity = Request(out).parse(url).identity
        end_s = time.monotonic() + 60
        while (found := read_state(out / f"{TRAIN}.index", identity)) is None or (
            found[0].chunk < num_mib - 4
        ):
            assert time.monotonic() < end_s and child.poll() is None
            time.sleep(0.02)
        child.send_signal(signal.SIGKILL)
        child.wait()
        is_holding = False
        seen.clear()
        result = index(url, out, checksums=True)
    starts = [int(request["range"][6:].partition("-")[0]) for request in seen]
    assert min(start for start in starts if start) >= (num_mib - 4) * CHUNK
    assert result.verified == "md5 (published)"
    assert result.place.read_bytes() == index_file(tmp_path / "in", LARGE, checksums=True)
    assert list_folder(out) == [f"{TRAIN}.index"]


def test_a_silent_connection_is_replaced(tmp_path: Path) -> None:
    was_silent = False

    def hang_once(handler: Handler) -> bool:
        nonlocal was_silent
        if was_silent or first_byte(handler) < 4 * CHUNK:
            return False
        was_silent = True
        time.sleep(3)
        return True

    with serving_tar(LARGE, misbehave=hang_once) as (url, _):
        found = index(url, tmp_path / "out")
    assert was_silent
    assert found.place.read_bytes() == index_file(tmp_path / "in", LARGE)


def test_several_caches_of_a_federation_share_the_pass(tmp_path: Path) -> None:
    with federation([LARGE, LARGE], LARGE) as (director, *_):
        found = index(f"osdf:///ns/{TRAIN}", tmp_path / "out", discovery=director)
    assert found.place.read_bytes() == index_file(tmp_path / "in", LARGE)


def send_whole(handler: Handler) -> bool:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(handler.content)))
    handler.end_headers()
    handler.wfile.write(handler.content)
    return True


def test_a_server_that_only_sends_the_whole_is_refused(tmp_path: Path) -> None:
    with serving_tar(LARGE, misbehave=send_whole) as (url, _):
        with pytest.raises(UserError, match="fetch_osdf") as caught:
            index(url, tmp_path)
    assert "\n" not in str(caught.value)
    assert list_folder(tmp_path) == []


def test_a_pass_over_another_object_is_not_continued(tmp_path: Path) -> None:
    with serving_tar(LARGE, misbehave=refuse_beyond(12 * CHUNK)) as (url, _):
        with pytest.raises(PassingError):
            index(url, tmp_path / "out", options=QUICK)
        saved = part_path(tmp_path / "out" / f"{TRAIN}.index").read_bytes()
    other = nested_bytes(make_tree())
    with serving_tar(other) as (url, _):
        found = index(url, tmp_path / "out")
        assert found.place.read_bytes() == index_file(tmp_path / "in", other)
    assert saved


def test_an_object_that_changed_since_is_read_anew(tmp_path: Path) -> None:
    contents = [LARGE, nested_bytes(make_tree())]

    def serve(handler: Handler) -> bool:
        handler.content = contents[0]
        return len(contents) == 2 and refuse_beyond(12 * CHUNK)(handler)

    with serving_tar(b"", misbehave=serve) as (url, _):
        with pytest.raises(PassingError):
            index(url, tmp_path / "out", options=QUICK)
        contents.pop(0)
        found = index(url, tmp_path / "out")
    assert found.place.read_bytes() == index_file(tmp_path / "in", contents[0])


@pytest.mark.parametrize("damage", [b"", b"PK", b"\0" * 100])
def test_a_damaged_state_is_not_used(tmp_path: Path, damage: bytes) -> None:
    part_path(tmp_path / f"{TRAIN}.index").write_bytes(damage)
    with serving_tar(LARGE) as (url, _):
        assert index(url, tmp_path).fetched_bytes == len(LARGE)
    assert list_folder(tmp_path) == [f"{TRAIN}.index"]


def test_an_index_that_is_there_is_taken_unless_more_is_asked_for(tmp_path: Path) -> None:
    with serving_tar(LARGE) as (url, _):
        assert index(url, tmp_path).is_new
        assert not index(url, tmp_path).is_new
        assert index(url, tmp_path, checksums=True).is_new
        assert not index(url, tmp_path).is_new, "with checksums it has more than was asked for"
