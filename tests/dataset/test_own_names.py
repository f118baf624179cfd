"""Files of the user and objects of any name survive: our own files have names of their own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dataset.checksum import compute
from dataset.errors import UserError
from dataset.federation.lookup import Options
from dataset.fetch.ledger import Ledger
from dataset.fetch.request import Request
from dataset.fetch.urls import fetch_urls
from dataset.own_names import LOCK, PART, RECORD, STAGES, check_names, journal_path, part_path
from dataset.transfer.journal import CHUNK, Arrivals, Journal, read_boot_id
from tests.dataset.dav_server import serving_tree
from tests.dataset.object_fetch import CONTENT, FAST, NOWHERE, fetch
from tests.dataset.small_server import Handler, serving

OWN = [RECORD, LOCK, STAGES, f"x{PART}", f"x{PART}.journal", f"X{PART.upper()}.journal.doubted"]
OWN += [f"x{PART}.units"]


def contents(folder: Path) -> dict[str, bytes]:
    found = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    return {name: p.read_bytes() for name, p in found.items() if name not in (RECORD, LOCK)}


def test_a_file_of_the_user_called_part_survives(tmp_path: Path) -> None:
    mine = {f"object.bin.part{end}": os.urandom(99) for end in ("", ".journal", ".journal.new")}
    for name, content in mine.items():
        (tmp_path / name).write_bytes(content)
    with serving(CONTENT) as (url, _):
        fetch(url, tmp_path)
    assert contents(tmp_path) == {**mine, "object.bin": CONTENT}


@pytest.mark.parametrize("size", [1000, 5 * CHUNK], ids=["small", "large"])
def test_objects_called_part_arrive_beside_their_namesakes(size: int, tmp_path: Path) -> None:
    names = ("x.bin", "x.bin.part", "x.bin.part.journal", "x.bin.part.part")
    files = {f"/data/{name}": os.urandom(size) for name in names}
    expected = {path[1:]: content for path, content in files.items()}
    request = Request(tmp_path / "a", FAST, environ=NOWHERE)
    with serving_tree(files) as (url, _):
        fetch_urls([f"{url}/data/"], request)
        fetch_urls([f"{url}/data/"], request)  # again, with all of it here
        single = Request(tmp_path / "b", FAST, environ=NOWHERE)
        fetch_urls([url + path for path in files], single)
    assert contents(tmp_path / "a") == expected
    assert contents(tmp_path / "b") == {name[len("data/") :]: c for name, c in expected.items()}


@pytest.mark.parametrize("name", OWN)
def test_an_object_with_a_name_of_ours_is_refused_and_nothing_written(
    name: str, tmp_path: Path
) -> None:
    with serving_tree({f"/{name}": b"x"}) as (url, gets), pytest.raises(UserError, match="name"):
        fetch_urls([f"{url}/{name}"], Request(tmp_path / "out", FAST, environ=NOWHERE))
    assert gets == [] and not (tmp_path / "out").exists()


def test_a_collection_may_hold_our_records_but_no_unfinished_transfer(tmp_path: Path) -> None:
    request = Request(tmp_path, FAST, environ=NOWHERE)
    files = {f"/data/{name}": name.encode() for name in (RECORD, LOCK, STAGES)}
    with serving_tree(files) as (url, _):
        fetch_urls([f"{url}/data/"], request)
    assert {p.name: p.read_text() for p in (tmp_path / "data").iterdir()} == {
        name: name for name in (RECORD, LOCK, STAGES)
    }
    for bad in (f"/more/x{PART}", f"/more/x{PART}/y"):
        with serving_tree({bad: b"", "/more/y": b""}) as (url, _), pytest.raises(UserError):
            fetch_urls([f"{url}/more/"], request)
    assert not (tmp_path / "more").exists()


def test_what_the_command_itself_writes_is_never_an_object(tmp_path: Path) -> None:
    summary = tmp_path / "sub" / ".." / "x.bin"
    with pytest.raises(UserError, match="--summary"):
        check_names([tmp_path / "x.bin"], tmp_path, [summary])
    check_names([tmp_path / "y.bin"], tmp_path, [summary, Path("/elsewhere/y.bin")])


@pytest.mark.parametrize("name", [RECORD, LOCK, STAGES, f"x{PART}"])
def test_a_summary_does_not_replace_a_record_of_the_fetch(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="another --summary"):
        check_names([tmp_path / "y"], tmp_path, [tmp_path / STAGES, tmp_path / "z" / ".." / name])


def test_two_addresses_that_differ_in_their_token_are_not_taken_for_one(tmp_path: Path) -> None:
    with serving(CONTENT) as (url, seen), pytest.raises(UserError, match="have the same name"):
        fetch_urls([f"{url}?token=a", f"{url}?token=b"], Request(tmp_path, environ=NOWHERE))
    assert not seen


@pytest.mark.parametrize("name", [RECORD, LOCK])
def test_a_file_of_the_user_where_our_record_would_be_is_not_touched(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text("mine\n")
    with serving(CONTENT) as (url, _), pytest.raises(UserError, match="another --out"):
        fetch(url, tmp_path)
    assert (tmp_path / name).read_text() == "mine\n"


def test_a_record_with_torn_and_hostile_lines_is_still_ours(tmp_path: Path) -> None:
    good = '{"name": "a", "size": 1}'
    bad = ["[" * 5000, '{"name": ["a"]}', '{"name": "b", "size": 1e400}', "null", '{"nam']
    bad.append('{"name": "c", "size": 1, "digests": 5}')
    bad.append('{"name": "d", "size": 1, "verified": [5]}')
    (tmp_path / RECORD).write_text("\n".join(["", '{"na', good, *bad]))
    ledger = Ledger(tmp_path)
    assert [ledger.knows(tmp_path / name) for name in "abcd"] == [True, False, False, False]


def test_a_ledger_that_is_not_kept_leaves_no_trace(tmp_path: Path) -> None:
    (tmp_path / RECORD).write_text("the job's own\n")
    (tmp_path / "x").write_bytes(b"x")
    ledger = Ledger(tmp_path, is_kept=False)
    ledger.add([ledger.make(tmp_path / "x", "somewhere", [], {})])
    assert ledger.find(tmp_path / "x", "somewhere") is not None
    assert (tmp_path / RECORD).read_text() == "the job's own\n"


def leave_older(out: Path, identity: str, doubted: bool = False) -> None:
    """What an earlier version left of an unfinished transfer: its first three chunks."""
    (out / "object.bin.part").write_bytes(CONTENT[: 3 * CHUNK].ljust(len(CONTENT), b"\0"))
    kinds = ("crc32c",)
    arrivals = Arrivals(identity, len(CONTENT), kinds, read_boot_id(), sources=["x"])
    for n in range(3):
        arrivals.chunks[n] = (0, (compute("crc32c", CONTENT[n * CHUNK : (n + 1) * CHUNK]),))
    name = "object.bin.part.journal" + (".doubted" if doubted else "")
    Journal.create(out / name, arrivals).close()


@pytest.mark.parametrize("doubted", [False, True], ids=["killed", "doubted"])
def test_what_an_older_version_left_is_gone_on_with(doubted: bool, tmp_path: Path) -> None:
    with serving(CONTENT) as (url, _):
        leave_older(tmp_path, url, doubted)
        summary = fetch(url, tmp_path)
    assert summary.resumed_bytes == 3 * CHUNK
    assert contents(tmp_path) == {"object.bin": CONTENT}


def test_an_older_part_of_another_object_is_left_alone(tmp_path: Path) -> None:
    leave_older(tmp_path, "http://elsewhere/object.bin")
    before = contents(tmp_path)
    with serving(CONTENT) as (url, _):
        assert fetch(url, tmp_path).resumed_bytes == 0
    assert contents(tmp_path) == {**before, "object.bin": CONTENT}


def test_an_object_whose_name_leaves_no_room_for_an_ending_arrives(tmp_path: Path) -> None:
    name = "ü" * 120 + ".tar"
    with serving_tree({f"/{name}": CONTENT}) as (url, _):
        fetch_urls([f"{url}/{name}"], Request(tmp_path, FAST, environ=NOWHERE))
    assert contents(tmp_path) == {name: CONTENT}
    assert len(os.fsencode(journal_path(tmp_path / name).name)) < 200


def test_a_file_that_appears_during_a_transfer_is_not_overwritten(tmp_path: Path) -> None:
    def put_a_file(handler: Handler) -> bool:
        if handler.headers.get("Range") != "bytes=0-0":
            (tmp_path / "object.bin").write_bytes(b"mine")
        return False

    options = Options(stall_s=1.0, give_up_s=5.0, connections=1)
    with serving(CONTENT, put_a_file) as (url, _), pytest.raises(UserError, match="appeared"):
        fetch(url, tmp_path, options)
    assert (tmp_path / "object.bin").read_bytes() == b"mine"
    assert part_path(tmp_path / "object.bin").exists()


def test_a_link_that_leads_nowhere_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "object.bin").symlink_to(tmp_path / "nowhere")
    with serving(CONTENT) as (url, _), pytest.raises(UserError, match="broken link"):
        fetch(url, tmp_path)
    assert (tmp_path / "object.bin").is_symlink()
