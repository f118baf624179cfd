"""What a stream of a URL takes: where its index is found, and each reason against it."""

from __future__ import annotations

import base64
import hashlib
import json
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataset import known_archives
from dataset.archive.index_file import write_whole
from dataset.errors import PassingError, UserError
from dataset.federation.connection import Connection, Pool
from dataset.fetch import ledger
from dataset.fetch.ledger import lock_folder, take_folder
from dataset.stream import plan as plan_module
from dataset.stream.plan import Refusal, StreamPlan, is_all_here, plan_stream
from tests.dataset.director_server import federation
from tests.dataset.object_fetch import FAST, fetch
from tests.dataset.small_server import Handler
from tests.dataset.stream.url_index import LARGE, ROOT, index_file, publish, serving_tar
from tests.dataset.tars import TRAIN, VAL, drop_unit_sums
from tests.mounts import mounted


@pytest.fixture
def index(tmp_path: Path) -> Path:
    index_file(tmp_path / "in", LARGE, checksums=True)
    return tmp_path / "in" / f"{TRAIN}.index"


def serve_files(files: dict[str, bytes]) -> Callable[[Handler], bool]:
    def serve(handler: Handler) -> bool:
        content = files.get(handler.path.rpartition("/")[2])
        handler.content = content or b""
        if content is None:
            handler.send_error(404)
        return content is None

    return serve


def plan(url: str, folder: Path, **fields: Any) -> StreamPlan | Refusal:
    return plan_stream(url, folder, options=FAST, **fields)


def refused(found: StreamPlan | Refusal) -> Refusal:
    assert isinstance(found, Refusal)
    return found


def test_an_index_beside_the_object_is_used(index: Path, tmp_path: Path) -> None:
    files = {TRAIN: LARGE, f"{TRAIN}.index": index.read_bytes()}
    with serving_tar(b"", misbehave=serve_files(files)) as (url, _):
        found = plan(url, tmp_path / "data")
    assert isinstance(found, StreamPlan) and not found.is_here and found.val is None
    assert found.train.index == tmp_path / "data" / f"{TRAIN}.index"
    assert found.train.index.read_bytes() == index.read_bytes()
    assert (found.train.url, found.train.size) == (url, len(LARGE))
    assert found.train.path == found.data == tmp_path / "data" / TRAIN
    assert not found.train.is_proven


def test_an_index_may_be_given_as_a_file_or_as_a_url(index: Path, tmp_path: Path) -> None:
    files = {TRAIN: LARGE, "other.index": index.read_bytes()}
    with serving_tar(b"", misbehave=serve_files(files)) as (url, _):
        by_file = plan(url, tmp_path / "a", index=str(index))
        by_url = plan(url, tmp_path / "b", index=url.replace(TRAIN, "other.index"))
    assert isinstance(by_file, StreamPlan) and by_file.train.index == index
    assert isinstance(by_url, StreamPlan)
    assert by_url.train.index == tmp_path / "b" / "other.index"


def test_without_an_index_the_command_that_makes_one_is_said(tmp_path: Path) -> None:
    with serving_tar(b"", misbehave=serve_files({TRAIN: LARGE})) as (url, _):
        found = refused(plan(url, tmp_path / "data"))
    assert found.reason == f"there is no {TRAIN}.index beside {url}"
    command = f"python scripts/index_tar.py --checksums --index-dir {tmp_path / 'data'} {url}"
    assert found.command == command


def test_that_command_is_all_that_is_missing(tmp_path: Path) -> None:
    with serving_tar(b"", misbehave=serve_files({TRAIN: LARGE})) as (url, _):
        _, *words = shlex.split(refused(plan(url, tmp_path / "data")).command)
        subprocess.run([sys.executable, *words], cwd=ROOT, check=True, timeout=280)
        found = plan(url, tmp_path / "data")
    assert isinstance(found, StreamPlan)


def test_that_command_has_the_federation_and_the_token_that_were_given(tmp_path: Path) -> None:
    (tmp_path / "a token").write_text("x")
    fields: dict[str, Any] = {"federation": "http://127.0.0.1:1", "token": tmp_path / "a token"}
    with serving_tar(b"", misbehave=serve_files({TRAIN: LARGE})) as (url, _):
        found = refused(plan(url, tmp_path / "data", **fields))
    words = shlex.split(found.command)
    assert words[5:-1] == ["--federation", "http://127.0.0.1:1", "--token", str(fields["token"])]


@pytest.mark.parametrize(("hours", "is_told"), [(1, True), (25, False)])
def test_a_token_that_expires_within_a_day_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, hours: int, is_told: bool
) -> None:
    claims = json.dumps({"exp": time.time() + 3600 * hours}).encode()
    (tmp_path / "token").write_text(f"e30.{base64.urlsafe_b64encode(claims).decode()}.sig")
    caplog.set_level("INFO")
    for require_token in (True, False):
        caplog.clear()
        with federation([LARGE], require_token=require_token) as (place, *_):
            fields: dict[str, Any] = {"federation": place, "token": tmp_path / "token"}
            plan(f"osdf:///ns/{TRAIN}", tmp_path / "data", **fields)
        assert ("the token expires at" in caplog.text) == (is_told and require_token)


def test_an_index_without_sums_of_each_mib_is_not_enough(index: Path, tmp_path: Path) -> None:
    with np.load(index) as arrays:
        plain = {k: v for k, v in arrays.items() if k not in ("block_size", "block_crc32")}
    blocks = -(-len(LARGE) // (4 << 20))
    old: dict[str, Any] = {
        "block_size": np.int64(4 << 20),
        "block_crc32c": np.zeros(blocks, np.uint32),
    }
    write_whole(plain, tmp_path / "plain")
    write_whole({**plain, **old}, tmp_path / "old")
    (tmp_path / "damaged").write_bytes(index.read_bytes()[:-100])
    told = {
        "plain": "has no checksums",
        "old": "crc32c of 4 MiB, not of 1",
        "damaged": "is damaged",
        "missing": "No such file",
    }
    for name, text in told.items():
        with serving_tar(LARGE) as (url, _), pytest.raises(UserError, match=text) as raised:
            plan(url, tmp_path / "data", index=str(tmp_path / name))
        assert f"give --index the index of {url}" in str(raised.value)
        assert "\n" not in str(raised.value)


def test_an_index_of_another_object_is_refused(index: Path, tmp_path: Path) -> None:
    """The user's, which a whole fetch would hide; and one beside the object, which is no reason."""
    other = LARGE + bytes(512)
    text = f"is for {len(LARGE)} bytes, the object has {len(other)}"
    files = {TRAIN: other, f"{TRAIN}.index": index.read_bytes()}
    with serving_tar(b"", misbehave=serve_files(files)) as (url, _):
        for given in (str(index), f"{url}.index"):
            with pytest.raises(UserError, match=text):
                plan(url, tmp_path / "data", index=given)
        assert text in refused(plan(url, tmp_path / "data")).reason


def test_the_url_of_a_tar_is_no_index(tmp_path: Path) -> None:
    """It would be fetched whole, and a file of that name would go."""
    with serving_tar(LARGE) as (url, _), pytest.raises(UserError, match=r"URL of a TAR\.index"):
        plan(url, tmp_path / "data", index=url)
    assert not (tmp_path / "data" / TRAIN).exists()


@pytest.mark.parametrize("fields", [{}, {"index_alone": True}], ids=["cache", "evaluation"])
def test_an_index_that_nobody_answers_about_is_a_passing_failure_where_it_is_needed(
    tmp_path: Path, fields: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a moment without a server would end a job of the grid for good, with exit 2."""
    monkeypatch.setattr("dataset.fetch.index_beside.AGAIN_S", 0.01)

    def fail(handler: Handler) -> bool:
        if not handler.path.endswith(".index"):
            return False
        handler.send_error(500)
        return True

    with serving_tar(LARGE, misbehave=fail) as (url, _):
        with pytest.raises(PassingError, match=r"nobody answers whether there is .*\.index"):
            plan(url, tmp_path / "data", is_bounded=True, **fields)
        assert "there is no" in refused(plan(url, tmp_path / "data")).reason


def stay_silent(handler: Handler) -> None:
    handler.connection.recv(1)  # until the other side gives up


def redirect_to_silence(handler: Handler) -> None:
    """As an origin's redirector does whose data server is down."""
    if "data-server" in handler.path:
        stay_silent(handler)
        return
    handler.send_response(307)
    handler.send_header("Location", f"/data-server{handler.path}")
    handler.send_header("Content-Length", "0")
    handler.end_headers()


def trickle(handler: Handler) -> None:
    """A head without an end, byte by byte: the socket alone would never time out."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
    while not select.select([handler.connection], [], [], 0.02)[0]:
        handler.wfile.write(b"x")


def hang_up(handler: Handler) -> None:
    """After the head, and before the byte that was asked for."""
    handler.send_response(206)
    handler.send_header("Content-Range", "bytes 0-0/1000")
    handler.send_header("Content-Length", "1")
    handler.end_headers()


def hang_up_in_head(handler: Handler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nServer: x\r\n")


@pytest.mark.parametrize(
    "misbehave", [stay_silent, redirect_to_silence, trickle, hang_up, hang_up_in_head]
)
@pytest.mark.parametrize("is_late", [False, True], ids=["", "slow-handshake"])
def test_silence_and_broken_connections_are_no_answer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    misbehave: Callable[[Handler], None],
    is_late: bool,
) -> None:
    """After a slow handshake the watch ends the wait, and not the time limit of the socket."""
    monkeypatch.setattr("dataset.fetch.index_beside.AGAIN_S", 0.01)
    if is_late:
        monkeypatch.setattr(Pool, "take", lambda pool, url: Connection(url, 60.0, pool.reach))

    def answer(handler: Handler) -> bool:
        if not handler.path.endswith(".index"):
            return False
        handler.close_connection = True
        with suppress(OSError):
            misbehave(handler)
        return True

    options = replace(FAST, stall_s=0.3)
    with (
        serving_tar(LARGE, misbehave=answer) as (url, _),
        pytest.raises(PassingError, match=r"nobody answers whether there is .*\.index"),
    ):
        plan_stream(url, tmp_path / "data", options=options, is_bounded=True)


@pytest.mark.parametrize("status", [400, 410, 200])
def test_a_server_that_says_no_in_its_own_way_has_no_index(tmp_path: Path, status: int) -> None:
    """A gateway's 400, or a page for people: asking again for days would not change it."""

    def answer(handler: Handler) -> bool:
        if not handler.path.endswith(".index"):
            return False
        page = b"<!DOCTYPE html><html>not found</html>"
        handler.send_response(status)
        handler.send_header("Content-Type", "text/html")
        handler.send_header("Content-Length", str(len(page)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(page)
        return True

    with serving_tar(LARGE, misbehave=answer) as (url, _):
        found = plan(url, tmp_path / "data", is_bounded=True)
    assert "there is no" in refused(found).reason


@pytest.mark.parametrize("is_given", [True, False])
def test_an_index_that_was_of_no_use_is_fetched_again(
    index: Path, tmp_path: Path, is_given: bool
) -> None:
    """Somebody may have replaced it; a file that we did not fetch is left alone."""
    files = {TRAIN: LARGE + bytes(512), f"{TRAIN}.index": index.read_bytes()}
    place = tmp_path / "data" / f"{TRAIN}.index"
    with serving_tar(b"", misbehave=serve_files(files)) as (url, _):
        given = {"index": f"{url}.index"} if is_given else {}
        with suppress(UserError):
            refused(plan(url, tmp_path / "data", **given))
        assert place.read_bytes() == index.read_bytes()
        files[f"{TRAIN}.index"] = index_file(tmp_path / "new", files[TRAIN], checksums=True)
        found = plan(url, tmp_path / "data", **given)
        assert isinstance(found, StreamPlan) and found.train.index == place
        place.write_bytes(b"mine")
        assert "is damaged" in refused(plan(url, tmp_path / "data")).reason
    assert place.read_bytes() == b"mine"


@pytest.mark.parametrize("is_given", [True, False])
def test_an_index_without_sums_of_units_comes_once(
    index: Path, tmp_path: Path, is_given: bool
) -> None:
    """Each start asks for its length alone, until somebody has made a new one."""
    good = index.read_bytes()
    drop_unit_sums(index)
    files = {TRAIN: LARGE, f"{TRAIN}.index": index.read_bytes()}
    with serving_tar(b"", misbehave=serve_files(files)) as (url, seen):
        fields: dict[str, Any] = {"index": f"{url}.index"} if is_given else {}
        fields["is_bounded"] = True
        for _ in range(3):
            with pytest.raises(UserError, match="of format 1") if is_given else nullcontext():
                assert "of format 1" in refused(plan(url, tmp_path / "data", **fields)).reason
        asked = [one["range"] for one in seen if one["path"].endswith(".index")]
        assert sum(span != "bytes=0-0" for span in asked) == 1
        files[f"{TRAIN}.index"] = good
        found = plan(url, tmp_path / "data", **fields)
    assert isinstance(found, StreamPlan) and found.train.index is not None
    assert found.train.index.read_bytes() == good


def test_an_index_is_proven_by_its_sha256(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(monkeypatch, LARGE)
    for sha256, is_proven in ((hashlib.sha256(index.read_bytes()).hexdigest(), True), ("0", False)):
        proven = {hashlib.md5(LARGE).hexdigest(): frozenset({sha256})}
        monkeypatch.setattr("dataset.stream.find_index.PROVEN_INDEXES", proven)
        with serving_tar(LARGE) as (url, _):
            found = plan(url, tmp_path / "data", index=str(index))
        assert isinstance(found, StreamPlan) and found.train.is_proven == is_proven
    assert known_archives.PROVEN_INDEXES == {}


def test_two_urls_are_train_and_val_in_any_order(index: Path, tmp_path: Path) -> None:
    files = {TRAIN: LARGE, f"{TRAIN}.index": index.read_bytes(), VAL: b"x" * 1000}
    with serving_tar(b"", misbehave=serve_files(files)) as (url, _):
        val = url.replace(TRAIN, VAL)
        for both in (f"{url},{val}", f"{val},{url}"):
            found = plan(both, tmp_path / "data")
            assert isinstance(found, StreamPlan) and found.val is not None
            assert (found.train.url, found.val.url) == (url, val)
            assert (found.val.size, found.val.index) == (1000, None)
            assert found.data == tmp_path / "data"
        with pytest.raises(UserError, match="a train and a val tar"):
            plan(f"{url},{url.replace(TRAIN, 'b.tar')}", tmp_path / "data")


def test_a_folder_is_its_two_archives(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {TRAIN, VAL, "valprep.sh", "notes.txt"}
    monkeypatch.setattr(plan_module, "list_top", lambda target, request: names)
    files = {TRAIN: LARGE, f"{TRAIN}.index": index.read_bytes(), VAL: b"x", "valprep.sh": b"mv\n"}
    with serving_tar(b"", misbehave=serve_files(files)) as (url, _):
        folder = url.rpartition("/")[0] + "/set/"
        found = plan(folder, tmp_path / "data")
        assert isinstance(found, StreamPlan) and found.val is not None
        assert (found.train.url, found.val.url) == (f"{folder}{TRAIN}", f"{folder}{VAL}")
        assert (tmp_path / "data" / "valprep.sh").read_bytes() == b"mv\n"
        names.remove(TRAIN)
        assert TRAIN in refused(plan(folder, tmp_path / "data")).reason


def test_what_is_no_tar_cannot_be_streamed(tmp_path: Path) -> None:
    assert "uncompressed tar" in refused(plan("http://127.0.0.1:1/x.zip", tmp_path)).reason


def test_a_disk_that_is_too_small_is_a_reason(index: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "data", "size=20m"), serving_tar(LARGE) as (url, _):
        found = refused(plan(url, tmp_path / "data", index=str(index)))
    assert "GB are free" in found.reason and not found.command


def test_what_is_here_needs_neither_an_index_nor_a_server(tmp_path: Path) -> None:
    with serving_tar(b"", misbehave=serve_files({TRAIN: LARGE})) as (url, _):
        fetch(url, tmp_path / "data")
    found = plan(url, tmp_path / "data")
    assert isinstance(found, StreamPlan) and found.is_here
    assert found.train.size == len(LARGE)


def test_whether_all_is_here_is_known_without_asking(tmp_path: Path) -> None:
    with serving_tar(b"", misbehave=serve_files({TRAIN: LARGE, VAL: b"x" * 1000})) as (url, seen):
        val, folder = url.replace(TRAIN, VAL), url.replace(TRAIN, "")
        fetch(url, tmp_path)
        num_requests = len(seen)
        assert is_all_here(url, tmp_path)
        for missing in (val, f"{url},{val}", folder):
            assert not is_all_here(missing, tmp_path)
        assert len(seen) == num_requests
        fetch(val, tmp_path)
        num_requests = len(seen)
        assert all(is_all_here(place, tmp_path) for place in (val, f"{url},{val}", folder))
        assert len(seen) == num_requests


def test_a_folder_of_another_stream_is_refused_by_name(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "DYING_S", 0.01)
    with (
        take_folder(tmp_path / "data", "a stream of x"),
        pytest.raises(UserError, match=r"process \d+ on .* \(a stream of x\)"),
    ):
        plan("http://127.0.0.1:1/x.tar", tmp_path / "data", index=str(index))


def test_a_fetch_into_the_same_folder_is_left_to_be_waited_for(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "DYING_S", 0.01)
    with lock_folder(tmp_path / "data", 0.0):
        found = plan("http://127.0.0.1:1/x.tar", tmp_path / "data", index=str(index))
    assert "is fetching into the same folder" in refused(found).reason


def test_what_is_here_needs_neither_the_folder_nor_the_network(tmp_path: Path) -> None:
    with serving_tar(LARGE) as (url, _):
        fetch(url, tmp_path / "data")
    with take_folder(tmp_path / "data", "a stream of x"):
        found = plan(url, tmp_path / "data")
    assert isinstance(found, StreamPlan) and found.is_here


def test_a_plan_of_another_process_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "DYING_S", 0.01)
    plans = ExitStack()
    plans.enter_context(take_folder(tmp_path, ledger.PLANNING))
    waits, lock_within = iter(range(3)), ledger._lock_within

    def wait(fd: int, wait_s: float) -> bool:
        if next(waits) == 2:
            plans.close()
        return lock_within(fd, wait_s)

    monkeypatch.setattr(ledger, "_lock_within", wait)
    with take_folder(tmp_path, "a stream of x"):
        assert list(waits) == []


def test_a_tar_that_somebody_put_there_is_left_to_the_whole_fetch(
    index: Path, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    with serving_tar(LARGE) as (url, _):
        (tmp_path / "data" / TRAIN).write_bytes(LARGE)
        found = plan(url, tmp_path / "data", index=str(index))
    assert "is there already" in refused(found).reason
