"""The engine against plain servers: what one server can do wrong, and what a second start does."""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import threading
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from dataset import checksum
from dataset.errors import DataError, PassingError, UserError, run_command
from dataset.fetch.request import Request, check_native_size
from dataset.transfer.journal import CHUNK
from tests.dataset.object_fetch import CONTENT, FAST, NOWHERE, fetch
from tests.dataset.small_server import Handler, serving


def test_an_object_arrives_whole(tmp_path: Path) -> None:
    with serving(CONTENT) as (url, _):
        summary = fetch(url, tmp_path)
    assert (tmp_path / "object.bin").read_bytes() == CONTENT
    assert summary.fetched_bytes == len(CONTENT)
    assert any("not verified" in note for note in summary.notes)


@pytest.mark.parametrize("size", [0, 1, CHUNK, 4 * CHUNK, 4 * CHUNK + 1])
def test_every_size_arrives(size: int, tmp_path: Path) -> None:
    with serving(CONTENT[:size]) as (url, _):
        fetch(url, tmp_path)
    assert (tmp_path / "object.bin").read_bytes() == CONTENT[:size]


def test_a_file_is_copied_and_checked(tmp_path: Path) -> None:
    (tmp_path / "source.bin").write_bytes(CONTENT)
    md5 = hashlib.md5(CONTENT).hexdigest()
    summary = fetch(f"file://{tmp_path}/source.bin", tmp_path / "out", given={"md5": md5})
    assert (tmp_path / "out" / "source.bin").read_bytes() == CONTENT
    assert summary.verified == ["md5 (given)"]


@pytest.mark.parametrize("has_wheel", [True, False], ids=["crc32c", "without_crc32c"])
@pytest.mark.parametrize("kind", ["md5", "sha256", "crc32"])
def test_digests_that_are_given_are_checked(
    kind: str, has_wheel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksum, "HAS_CRC32C", has_wheel)
    value = f"{zlib.crc32(CONTENT):08x}"
    if kind != "crc32":
        value = hashlib.new(kind, CONTENT).hexdigest()
    with serving(CONTENT) as (url, _):
        assert fetch(url, tmp_path / "a", given={kind: value}).verified == [f"{kind} (given)"]
        with pytest.raises(DataError, match="fails verification"):
            fetch(
                url, tmp_path / "b", given={kind: value[:-1] + ("0" if value[-1] != "0" else "1")}
            )
    assert not (tmp_path / "b" / "object.bin").exists()


@pytest.mark.parametrize("given", [{}, {"md5": hashlib.md5(CONTENT).hexdigest()}])
def test_connections_leave_the_cpu_to_a_hash_that_follows_them(
    given: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()

    def write(fd: int, view: memoryview, offset: int) -> None:
        seen.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        os.pwrite(fd, view, offset)

    monkeypatch.setattr("dataset.transfer.store.write_at", write)
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    with serving(CONTENT) as (url, _):
        fetch(url, tmp_path, given=given)
    assert seen == {min(19, mine + 10) if given else mine}
    assert os.getpriority(os.PRIO_PROCESS, 0) == mine


def test_a_server_without_ranges_is_read_in_one_go(tmp_path: Path) -> None:
    def ignore_range(handler: Handler) -> bool:
        del handler.headers["Range"]
        return False

    with serving(CONTENT, ignore_range) as (url, seen):
        fetch(url, tmp_path)
    assert (tmp_path / "object.bin").read_bytes() == CONTENT
    assert len(seen) <= 3  # the size, the object, and perhaps the first block


def test_an_answer_that_ends_with_its_connection_is_taken(tmp_path: Path) -> None:
    def close_each(handler: Handler) -> bool:
        handler.close_connection = True
        return False

    with serving(CONTENT, close_each) as (url, _):
        fetch(url, tmp_path)
    assert (tmp_path / "object.bin").read_bytes() == CONTENT


def test_a_kept_connection_that_the_server_closes_is_not_held_against_it(tmp_path: Path) -> None:
    def serve_once(handler: Handler) -> bool:
        if getattr(handler, "has_served", False):
            handler.close_connection = True
            return True  # the second request of a connection gets no answer
        handler.has_served = True  # type: ignore[attr-defined]
        return False

    with serving(CONTENT, serve_once) as (url, _):
        summary = fetch(url, tmp_path)
    assert (tmp_path / "object.bin").read_bytes() == CONTENT
    assert summary.sources[0]["errors"] == {}


def test_what_follows_an_answer_on_a_kept_connection_is_not_taken_for_the_next(
    tmp_path: Path,
) -> None:
    smuggled = b"HTTP/1.1 206 OK\r\nContent-Length: 4\r\nContent-Range: bytes 0-3/4\r\n\r\nevil"

    def add_more(handler: Handler) -> bool:
        handler.serve()
        handler.wfile.write(smuggled)
        return True

    with serving(CONTENT, add_more) as (url, _):
        fetch(url, tmp_path)
    assert (tmp_path / "object.bin").read_bytes() == CONTENT


def test_only_missing_bytes_are_asked_for_by_a_second_start(tmp_path: Path) -> None:
    is_broken = threading.Event()

    def break_down(handler: Handler) -> bool:
        if is_broken.is_set():
            handler.send_error(503)
            return True
        if "bytes=4194304-" in handler.headers.get("Range", ""):
            is_broken.set()
        return False

    with serving(CONTENT, break_down) as (url, seen):
        with pytest.raises(PassingError):
            fetch(url, tmp_path, replace(FAST, give_up_s=3.0, connections=1))
        is_broken.clear()
        seen.clear()
        summary = fetch(url, tmp_path, replace(FAST, connections=1))
    assert summary.resumed_bytes == 8 * CHUNK
    assert (tmp_path / "object.bin").read_bytes() == CONTENT
    assert {request["range"] for request in seen} == {"bytes=0-0", "bytes=8388608-9437260"}


@pytest.mark.parametrize("kind", ["text/html", "text/plain"])
def test_a_page_in_between_throws_nothing_away(kind: str, tmp_path: Path) -> None:
    shown = threading.Event()

    def show_a_page_once(handler: Handler) -> bool:
        if shown.is_set() or "bytes=0-" in handler.headers.get("Range", ""):
            return False
        shown.set()
        handler.send_response(200)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", "4")
        handler.end_headers()
        handler.wfile.write(b"soon")
        return True

    with serving(CONTENT, show_a_page_once) as (url, _):
        summary = fetch(url, tmp_path, replace(FAST, connections=1))
    assert shown.is_set()
    assert (tmp_path / "object.bin").read_bytes() == CONTENT
    assert summary.fetched_bytes == len(CONTENT)


def test_the_partial_file_of_another_object_is_not_used_and_that_is_said(tmp_path: Path) -> None:
    def break_down(handler: Handler) -> bool:
        if "bytes=0-" in handler.headers.get("Range", ""):
            return False
        handler.send_error(503)
        return True

    options = replace(FAST, give_up_s=1.0, connections=1)
    with serving(CONTENT, break_down) as (url, _), pytest.raises(PassingError):
        fetch(url, tmp_path, options)
    with serving(CONTENT[::-1]) as (url, _):
        summary = fetch(url, tmp_path)
    assert any("starting over" in note for note in summary.notes)
    assert (tmp_path / "object.bin").read_bytes() == CONTENT[::-1]


def test_a_redirect_is_followed_without_the_login(tmp_path: Path) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password secret\n")
    netrc.chmod(0o600)
    with serving(CONTENT) as (target, seen_behind):

        def redirect(handler: Handler) -> bool:
            handler.send_response(302)
            handler.send_header("Location", target.replace("127.0.0.1", "localhost"))
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return True

        with serving(b"", redirect) as (url, seen_first):
            fetch(url, tmp_path / "out", netrc=netrc)
    assert (tmp_path / "out" / "object.bin").read_bytes() == CONTENT
    assert seen_first[0]["authorization"] == "Basic " + base64.b64encode(b"me:secret").decode()
    assert all("authorization" not in request for request in seen_behind)


def test_a_login_that_is_refused_is_exit_2_and_names_netrc(tmp_path: Path) -> None:
    def refuse(handler: Handler) -> bool:
        handler.send_error(401)
        return True

    with serving(CONTENT, refuse) as (url, _), pytest.raises(UserError, match="netrc"):
        fetch(url, tmp_path)


@pytest.mark.parametrize("is_named", [True, False], ids=["--netrc", "~/.netrc"])
def test_a_broken_netrc_is_said_at_once_and_asks_nobody(is_named: bool, tmp_path: Path) -> None:
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine 127.0.0.1 lgin me password hunter2\n")
    environ = {**NOWHERE, "HOME": str(tmp_path)}
    with serving(CONTENT) as (url, seen), pytest.raises(UserError, match="line 1"):
        fetch(url, tmp_path / "out", netrc=netrc if is_named else None, environ=environ)
    assert seen == []


def test_a_broken_netrc_in_the_home_folder_is_no_matter_to_a_file(tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("nonsense\n")
    (tmp_path / "source.bin").write_bytes(CONTENT)
    fetch(f"file://{tmp_path}/source.bin", tmp_path / "out", environ={"HOME": str(tmp_path)})
    assert (tmp_path / "out" / "source.bin").read_bytes() == CONTENT


def test_an_error_in_a_question_for_the_size_ends_the_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(lookup: object, source: object) -> int:
        raise UserError("said in a thread")

    monkeypatch.setattr("dataset.fetch.size.ask_size", fail)
    with serving(CONTENT) as (url, _), pytest.raises(UserError, match="said in a thread"):
        fetch(url, tmp_path)


@pytest.mark.parametrize("end", ["", "/"])
def test_a_folder_is_refused_as_a_file(end: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="is a folder"):
        fetch(f"file://{tmp_path}/folder{end}", tmp_path / "out")


def test_an_index_that_was_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        Request(tmp_path, index=tmp_path / "typo.index")


@pytest.mark.parametrize("field", ["connections", "max_caches", "stall_s"])
def test_a_transfer_with_nothing_of_a_kind_is_refused(field: str) -> None:
    with pytest.raises(UserError, match="0"):
        replace(FAST, **{field: 0})  # type: ignore[arg-type]


def test_a_disk_that_fails_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(fd: int, view: memoryview, offset: int) -> None:  # a fake: no disk here fails
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("dataset.transfer.store.write_at", fail)
    with serving(CONTENT) as (url, _):
        assert run_command(lambda: int(not fetch(url, tmp_path))) == 2
    (line,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("error:")]
    assert f"Input/output error: {tmp_path}/object.bin.trainyard-part; the disk is failing" in line


def test_a_token_from_the_environment_stays_out_of_plain_servers(tmp_path: Path) -> None:
    with serving(CONTENT) as (url, seen):
        fetch(url, tmp_path, environ={**NOWHERE, "BEARER_TOKEN": "secret"})
    assert all("authorization" not in request for request in seen)


def test_a_server_that_lies_about_its_size_cannot_make_a_file(tmp_path: Path) -> None:
    def shrink(handler: Handler) -> bool:
        if "bytes=0-0" in handler.headers.get("Range", ""):
            return False
        handler.content = CONTENT[: 5 * CHUNK]
        return False

    options = replace(FAST, give_up_s=0.5)
    with serving(CONTENT, shrink) as (url, _), pytest.raises(PassingError):
        fetch(url, tmp_path, options)
    assert not (tmp_path / "object.bin").exists()


def test_a_file_of_the_users_own_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "object.bin").write_bytes(b"precious")
    with serving(CONTENT) as (url, _), pytest.raises(UserError, match="ove it away"):
        fetch(url, tmp_path)
    assert (tmp_path / "object.bin").read_bytes() == b"precious"


def test_a_file_of_the_users_own_that_proves_right_is_taken(tmp_path: Path) -> None:
    (tmp_path / "object.bin").write_bytes(CONTENT)
    with serving(CONTENT) as (url, seen):
        summary = fetch(url, tmp_path, given={"md5": hashlib.md5(CONTENT).hexdigest()})
    assert summary.verified == ["md5 (given)"]
    assert all("bytes=0-0" in request["range"] for request in seen)


def test_a_deadline_for_the_whole_transfer_is_kept(tmp_path: Path) -> None:
    def crawl(handler: Handler) -> bool:
        if "bytes=0-0" in handler.headers.get("Range", ""):
            return False
        handler.send_error(503)
        return True

    with serving(CONTENT, crawl) as (url, _), pytest.raises(PassingError, match="within 1 s"):
        fetch(url, tmp_path, replace(FAST, deadline_s=1.0, give_up_s=60.0))


def test_native_transfer_is_refused_above_5_gb_with_the_studys_message() -> None:
    check_native_size("a.tar", 4_999_000_000)
    with pytest.raises(UserError, match=r"TransferInputSizeMB \(158783\) .* MAX_TRANSFER_INPUT_MB"):
        check_native_size("a.tar", 158_783_000_000)


def test_native_transfer_needs_a_job(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="transfer_input_files"):
        fetch("osdf:///ns/a.tar", tmp_path, method="native")
