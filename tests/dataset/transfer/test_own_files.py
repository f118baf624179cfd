"""What lies in the way of a fetch survives it: links, pipes, files of the user, another fetch."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dataset.errors import PassingError, UserError, run_command
from dataset.fetch.request import Request
from dataset.fetch.urls import fetch_urls
from dataset.own_names import JOURNAL, LOCK, NEW, PART, RECORD, part_path
from dataset.transfer.journal import CHUNK
from dataset.transfer.own_files import hold_part
from tests.dataset.dav_server import TreeHandler, serving_tree
from tests.dataset.object_fetch import FAST, NOWHERE, fetch
from tests.dataset.small_server import running, serving

EMPTY_MD5 = "d41d8cd98f00b204e9800998ecf8427e"


def request(out: Path) -> Request:
    return Request(out, FAST, environ=NOWHERE)


@pytest.mark.parametrize("end", [PART, PART + JOURNAL, PART + JOURNAL + NEW])
@pytest.mark.parametrize("size", [1000, 5 * CHUNK], ids=["small", "large"])
def test_a_file_that_a_link_of_our_name_leads_to_is_not_touched(
    size: int, end: str, tmp_path: Path
) -> None:
    mine, folder, content = tmp_path / "mine", tmp_path / "out" / "data", os.urandom(size)
    mine.write_text("precious")
    folder.mkdir(parents=True)
    (folder / f"x{end}").symlink_to(mine)
    with serving_tree({"/data/x": content}) as (url, _):
        try:
            fetch_urls([f"{url}/data/"], request(tmp_path / "out"))
            assert (folder / "x").read_bytes() == content
        except UserError as error:
            assert "move it away" in str(error)
    assert mine.read_text() == "precious"


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


THINGS: dict[str, Callable[[Path], None]] = {
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a pipe": os.mkfifo,
    "a socket": make_socket,
    "a folder": Path.mkdir,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("thing", THINGS)
@pytest.mark.parametrize("name", ["object.bin", RECORD, LOCK, f"object.bin{PART}"])
def test_what_is_no_file_is_neither_waited_for_nor_a_crash(
    name: str, thing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    THINGS[thing](Path(name))
    with serving(b"") as (url, _):
        code = run_command(lambda: bool(fetch(url, Path(), given={"md5": EMPTY_MD5})) - 1)
    assert code == 2
    assert os.path.lexists(name) and not Path(name).is_file()


def test_a_link_that_leads_nowhere_is_not_replaced_by_a_small_file(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").symlink_to("nowhere")
    with serving_tree({"/data/x": b"x"}) as (url, _), pytest.raises(UserError, match="nowhere"):
        fetch_urls([f"{url}/data/"], request(tmp_path))
    assert (tmp_path / "data" / "x").is_symlink()


def test_a_file_that_appears_while_a_small_one_is_fetched_is_not_replaced(tmp_path: Path) -> None:
    class Writer(TreeHandler):
        def do_GET(self) -> None:
            (tmp_path / "data" / "x").write_text("mine")
            super().do_GET()

    files, folders = {"/data/x": b"abc"}, frozenset({"/data"})
    (tmp_path / "data").mkdir()
    server = running(Writer, files=files, folders=folders, gets=[])
    with server as url, pytest.raises(UserError, match="appeared"):
        fetch_urls([f"{url}/data/"], request(tmp_path))
    assert (tmp_path / "data" / "x").read_text() == "mine"


def test_a_link_in_place_of_an_optional_index_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.tar.index").symlink_to("nowhere")
    with serving_tree({"/x.tar": b"tar", "/x.tar.index": b"index"}) as (url, _):
        fetch_urls([f"{url}/x.tar"], request(tmp_path))
    assert (tmp_path / "x.tar").read_bytes() == b"tar"
    assert (tmp_path / "x.tar.index").is_symlink()


@pytest.mark.parametrize("size", [1000, 6 * CHUNK], ids=["small", "large"])
def test_two_fetches_that_meet_in_a_subfolder_do_not_mix(size: int, tmp_path: Path) -> None:
    """One has --out OUT and fetches sub/, the other --out OUT/sub: each has a lock of its own."""
    ours, others = os.urandom(size), os.urandom(size)
    seen: list[Exception] = []

    class Meeting(TreeHandler):
        """While it serves the first fetch, a second one runs from start to end."""

        started = threading.Lock()

        def do_GET(self) -> None:
            is_size = self.headers.get("Range") == "bytes=0-0"
            has_part = part_path(tmp_path / "sub" / "x").exists() or size < CHUNK
            if not is_size and has_part and self.started.acquire(blocking=False):
                try:
                    fetch_urls([f"{other}/x"], request(tmp_path / "sub"))
                except PassingError as error:
                    seen.append(error)
            super().do_GET()

    options = replace(FAST, stall_s=30.0, give_up_s=60.0, connections=1)
    files, folders = {"/sub/x": ours}, frozenset({"/sub"})
    server = running(Meeting, files=files, folders=folders, gets=[])
    with serving_tree({"/x": others}) as (other, _), server as url:
        try:
            fetch_urls([f"{url}/sub/"], replace(request(tmp_path), options=options))
            whole = ours
        except UserError as error:  # the second one was whole before the first one had its bytes
            assert "appeared" in str(error)
            whole = others
    assert (tmp_path / "sub" / "x").read_bytes() == whole
    assert bool(seen) == (whole is ours)


def test_a_partial_file_has_one_writer_and_is_free_after_it(tmp_path: Path) -> None:
    part = tmp_path / "part"
    fd = hold_part(part)
    with pytest.raises(PassingError, match="another process"):
        hold_part(part)
    part.replace(tmp_path / "final")
    other = hold_part(part)  # another file by now
    os.close(fd)
    assert not os.path.samestat(os.fstat(other), (tmp_path / "final").stat())
    os.close(other)
