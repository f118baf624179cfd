"""A pass that was killed, interrupted or given up goes on, or starts over if it must."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from dataset.errors import PassingError
from dataset.fetch.request import Request
from dataset.own_names import part_path
from dataset.stream import resumable_md5
from dataset.stream.pass_state import read_state
from dataset.transfer.journal import CHUNK
from tests.dataset.small_server import Handler
from tests.dataset.stream.url_index import (
    LARGE,
    QUICK,
    ROOT,
    first_byte,
    index,
    index_file,
    list_folder,
    publish,
    refuse_beyond,
    serving_tar,
)
from tests.dataset.tars import (
    TRAIN,
    make_tree,
    nested_bytes,
)


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
    assert found.is_md5_lost == (not has_libcrypto)
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


def kill_when_saved(child: subprocess.Popen[str], out: Path, url: str, num_chunks: int) -> None:
    """Kills a pass once its state has at least so many chunks."""
    identity = Request(out).parse(url).identity
    while (found := read_state(out / f"{TRAIN}.index", identity)) is None or (
        found[0].chunk < num_chunks
    ):
        assert child.poll() is None
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()


@pytest.mark.parametrize("num_mib", [5, 17])
def test_after_a_kill_the_pass_goes_on_and_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_mib: int
) -> None:
    assert resumable_md5.find_libcrypto(), "Debian's pip cannot do without it"
    publish(monkeypatch, LARGE)
    out, is_holding = tmp_path / "out", True

    def hold(handler: Handler) -> bool:
        while is_holding and first_byte(handler) >= num_mib * CHUNK:
            time.sleep(0.01)
        return False

    with serving_tar(LARGE, misbehave=hold) as (url, seen):
        arguments = [url, str(out), str(len(LARGE)), hashlib.md5(LARGE).hexdigest()]
        command = [sys.executable, "-c", textwrap.dedent(CHILD), *arguments]
        child = subprocess.Popen(command, cwd=ROOT, text=True)
        kill_when_saved(child, out, url, num_mib - 4)
        is_holding = False
        seen.clear()
        result = index(url, out, checksums=True)
    starts = [int(request["range"][6:].partition("-")[0]) for request in seen]
    assert min(start for start in starts if start) >= (num_mib - 4) * CHUNK
    assert result.verified == "md5 (published)"
    assert result.place.read_bytes() == index_file(tmp_path / "in", LARGE, checksums=True)
    assert list_folder(out) == [f"{TRAIN}.index"]


# The command on a machine without libcrypto, with a published archive; it saves at every chance.
COMMAND = """
    import runpy, sys
    from dataset import known_archives
    from dataset.stream import forward_pass, resumable_md5
    name, size, md5, *words = sys.argv[1:]
    archive = known_archives.PublishedArchive(name, int(size), md5, "", 10, 100)
    known_archives.published_archives = lambda: {int(size): archive}
    resumable_md5.find_libcrypto = lambda: None
    forward_pass.SAVE_S = 0.0
    sys.argv = ["scripts/index_tar.py", *words]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_pass_resumed_without_libcrypto_says_why_it_is_not_verified(tmp_path: Path) -> None:
    out, is_holding = tmp_path / "out", True

    def hold(handler: Handler) -> bool:
        while is_holding and first_byte(handler) >= 12 * CHUNK:
            time.sleep(0.01)
        return False

    with serving_tar(LARGE, misbehave=hold) as (url, _):
        published = [TRAIN, str(len(LARGE)), hashlib.md5(LARGE).hexdigest()]
        command = [sys.executable, "-c", textwrap.dedent(COMMAND), *published]
        command += ["--index-dir", str(out), url]
        kill_when_saved(subprocess.Popen(command, cwd=ROOT, text=True), out, url, 8)
        is_holding = False
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "verified" in line]
    assert line.endswith(
        ", not verified: the pass was resumed, and its MD5 is not known without libcrypto in both "
        "starts"
    )


SMALL_WINDOW = """
    import runpy
    from dataset.stream import forward_pass
    forward_pass.WINDOW_CHUNKS = 8
    runpy.run_path("scripts/index_tar.py", run_name="__main__")
"""


def test_ctrl_c_saves_what_was_reached(tmp_path: Path) -> None:
    """Long before it is time to save, so it is the Ctrl-C that did.

    With a window of 8 MiB, MiB 12 is not requested before the first 5 have been read.
    """
    is_holding, num_held = True, 0

    def hold(handler: Handler) -> bool:
        nonlocal num_held
        num_held += first_byte(handler) >= 12 * CHUNK
        while is_holding and first_byte(handler) >= 12 * CHUNK:
            time.sleep(0.01)
        return False

    out = tmp_path / "out"
    with serving_tar(LARGE, misbehave=hold) as (url, _):
        command = [sys.executable, "-c", textwrap.dedent(SMALL_WINDOW)]
        child = subprocess.Popen(
            [*command, "--index-dir", str(out), url], cwd=ROOT, start_new_session=True
        )
        while not num_held:
            assert child.poll() is None
            time.sleep(0.02)
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 130
        found = read_state(out / f"{TRAIN}.index", Request(out).parse(url).identity)
        is_holding = False
        assert found is not None and found[0].chunk >= 5
        result = index(url, out)
    assert result.place.read_bytes() == index_file(tmp_path / "in", LARGE)


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
