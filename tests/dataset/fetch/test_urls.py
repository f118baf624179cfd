"""URLs into a folder: odd names, empty collections, full disks, and starts without a network."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest

from dataset import byte_meter
from dataset.errors import PassingError, UserError
from dataset.federation.lookup import Options
from dataset.fetch import urls
from dataset.fetch.inspect import describe_sources
from dataset.fetch.request import Request, Summary
from dataset.fetch.small_files import SMALL_BYTES
from dataset.fetch.urls import fetch_dataset, fetch_urls
from dataset.own_names import journal_path
from dataset.transfer.resume import discard
from tests.dataset import dav_server
from tests.dataset.dav_server import serving_tree
from tests.dataset.object_fetch import NOWHERE
from tests.dataset.small_server import running
from tests.mounts import read_only

ROOT = Path(__file__).resolve().parents[3]
FAST = Options(stall_s=2.0, give_up_s=10.0, missing_s=0.5, connections=3)
ODD = "a=b+c@d:e,(f)!"


def fetch(url: str, out: Path, **fields: object) -> list[Summary]:
    return fetch_urls([url], Request(out, FAST, environ=NOWHERE, **fields))  # type: ignore[arg-type]


def refuse_network(url: str) -> None:
    raise PassingError("no network: this test has none")


def spell_sparsely(path: str) -> str:
    return quote(path, safe="/=+@:,()!")


def spell_fully(path: str) -> str:
    return quote(path)


@pytest.mark.parametrize("spell_url", [spell_sparsely, spell_fully])
@pytest.mark.parametrize("spell_href", [spell_sparsely, spell_fully])
def test_a_collection_with_an_odd_name_is_fetched(
    spell_url: Callable[[str], str], spell_href: Callable[[str], str], tmp_path: Path
) -> None:
    files = {
        f"/ns/{ODD}/one.bin": b"one",
        f"/ns/{ODD}/{ODD}/two=2.bin": b"two two",
        f"/ns/{ODD}/large@.bin": os.urandom(5 << 20),
    }
    with serving_tree(files, spell_href) as (root, gets):
        fetch(f"{root}{spell_url(f'/ns/{ODD}')}/", tmp_path)
        gets.clear()
        fetch(f"{root}{spell_url(f'/ns/{ODD}')}/", tmp_path)
    assert gets == []
    for path, content in files.items():
        assert (tmp_path / path.removeprefix("/ns/")).read_bytes() == content
    assert len([path for path in (tmp_path / ODD).rglob("*") if path.is_file()]) == len(files)


@pytest.mark.parametrize("told", ["", "<D:getcontentlength/>", "0"])
def test_a_file_is_as_large_as_its_server_says_and_not_its_listing(
    told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = "<D:getcontentlength>{}</D:getcontentlength>"
    told = size.format("0<!-- {} -->") if told == "0" else f"{told}<!-- {{}} -->"
    monkeypatch.setattr(dav_server, "RESPONSE", dav_server.RESPONSE.replace(size, told))
    files = {"/ns/d/full.txt": b"not empty", "/ns/d/empty.txt": b""}
    with serving_tree(files) as (root, _):
        fetch(f"{root}/ns/d/", tmp_path)
        known = "2 files, 0 bytes" if ">0<" in told else "0 files, 0 bytes, 2 more of unknown size"
        assert describe(root, tmp_path).endswith(known)
    assert {path: (tmp_path / path[4:]).read_bytes() for path in files} == files


def describe(root: str, out: Path) -> str:
    request = Request(out, FAST, environ=NOWHERE, recursive=True)
    return " ".join(describe_sources(request.parse(f"{root}/ns/d/"), request))


def test_a_collection_without_files_is_said(tmp_path: Path) -> None:
    empty = ("/ns", "/ns/empty", "/ns/empty/sub")
    with serving_tree({}, empty_folders=empty) as (root, _):
        with pytest.raises(UserError, match="/ns/empty/ holds no files"):
            fetch(f"{root}/ns/empty/", tmp_path)


def test_too_little_space_for_a_collection_is_said_before_its_first_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {f"/ns/many/{n}.bin": bytes(1 << 20) for n in range(20)}
    free = 30 << 20  # each file fits, all of them with the spare do not

    def statvfs(path: object) -> os.statvfs_result:
        return os.statvfs_result((4096, 4096, *[free // 4096] * 3, 9, 9, 9, 0, 255))

    monkeypatch.setattr("dataset.fetch.ledger.os.statvfs", statvfs)
    with serving_tree(files) as (root, gets):
        with pytest.raises(UserError, match=r"needs 0\.04 GB more .* 0\.03 GB are free"):
            fetch(f"{root}/ns/many/", tmp_path)
        assert gets == []
        free = 40 << 20
        fetch(f"{root}/ns/many/", tmp_path)
        free = 0
        fetch(f"{root}/ns/many/", tmp_path)  # nothing is missing: no space is needed


def test_small_files_are_counted_for_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(byte_meter, "_LINE_S", 0.0)
    files = {f"/ns/many/{n}.bin": bytes(1_000_000) for n in range(5)}
    with serving_tree(files) as (root, _), caplog.at_level(logging.INFO):
        fetch(f"{root}/ns/many/", tmp_path)
    lines = [r.getMessage() for r in caplog.records if r.name == "trainyard.progress"]
    assert len(lines) == len(files)
    assert lines[-1].startswith("many, small files: 5 of 5 MB")


@pytest.mark.parametrize("name", ["a.bin", "a.tar", "noending"])
def test_a_finished_object_is_found_without_a_network(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving_tree({f"/ns/{name}": b"content"}) as (root, gets):
        fetch(f"{root}/ns/{name}", tmp_path)
        gets.clear()
        monkeypatch.setattr(urls, "check_network", refuse_network)
        (again,) = fetch(f"{root}/ns/{name}", tmp_path)
        assert (again.status, again.fetched_bytes, gets) == ("done", 0, [])
        with pytest.raises(PassingError, match="no network"):
            fetch(f"{root}/ns/{name}", tmp_path, given={"md5": "0" * 32})


def test_a_training_starts_from_a_finished_archive_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving_tree({"/ns/ILSVRC2012_img_train.tar": b"content"}) as (root, _):
        url = f"{root}/ns/ILSVRC2012_img_train.tar"
        first = fetch_dataset(url, tmp_path, options=FAST)
    monkeypatch.setattr(urls, "check_network", refuse_network)
    assert fetch_dataset(url, tmp_path, options=FAST) == first


def test_only_what_is_missing_needs_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving_tree({"/ns/a.bin": b"a", "/ns/b.bin": b"b"}) as (root, _):
        fetch(f"{root}/ns/a.bin", tmp_path)
        checked: list[str] = []
        monkeypatch.setattr(urls, "check_network", checked.append)
        both = [f"{root}/ns/a.bin", f"{root}/ns/b.bin"]
        fetch_urls(both, Request(tmp_path, FAST, environ=NOWHERE))
    assert checked == [f"{root}/ns/b.bin"]
    assert (tmp_path / "b.bin").read_bytes() == b"b"


def test_a_file_in_place_of_the_folder_is_one_line_and_exit_2(tmp_path: Path) -> None:
    (tmp_path / "source.bin").write_bytes(b"content")
    (tmp_path / "file").write_bytes(b"precious")
    command = [sys.executable, str(ROOT / "scripts" / "fetch_osdf.py")]
    command += [f"file://{tmp_path}/source.bin", "--out", str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert f"error: {tmp_path}/file exists and is not a folder" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "file").read_bytes() == b"precious"


def test_a_file_in_place_of_a_collections_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "many").write_bytes(b"precious")
    with serving_tree({"/ns/many/a.bin": b"a"}) as (root, _):
        with pytest.raises(UserError, match="many exists and is not a folder"):
            fetch(f"{root}/ns/many/", tmp_path)


def test_a_finished_file_is_taken_from_a_read_only_folder(tmp_path: Path) -> None:
    """There unlink fails even for a file that does not exist."""
    with serving_tree({"/ns/a.tar": b"all of it"}) as (root, gets):
        fetch(f"{root}/ns/a.tar", tmp_path / "out")
        gets.clear()
        with read_only(tmp_path / "out") as out:
            with pytest.raises(OSError, match="Read-only file system"):
                (out / "not there").unlink()
            (summary,) = fetch(f"{root}/ns/a.tar", out)
            discard(out / "a.tar")
        assert (gets, summary.fetched_bytes) == ([], 0)
    assert (tmp_path / "out" / "a.tar").read_bytes() == b"all of it"


def test_a_training_fetches_the_tars_and_not_the_zip_beside_them(tmp_path: Path) -> None:
    names = list(urls.DATA_NAMES)
    with serving_tree({f"/ns/data/{name}": name.encode() for name in names}) as (root, _):
        fetch_dataset(f"{root}/ns/data/", tmp_path / "both", options=FAST)
    there = {path.name for path in (tmp_path / "both").iterdir()}
    assert {*names[:2], "valprep.sh"} <= there
    assert not there & set(urls.KAGGLE_NAMES)
    with serving_tree({f"/ns/data/{name}": b"x" for name in names[2:]}) as (root, _):
        fetch_dataset(f"{root}/ns/data/", tmp_path / "zip", options=FAST)
    assert (tmp_path / "zip" / names[2]).exists()


def test_a_dry_run_counts_the_files_of_a_collection(tmp_path: Path) -> None:
    files = {"/ns/many/a": b"12", "/ns/many/below/b": b"345"}
    with serving_tree(files) as (root, _):
        request = Request(tmp_path, FAST, environ=NOWHERE)
        (line,) = describe_sources(request.parse(f"{root}/ns/many/"), request)
    assert line.endswith(": 2 files, 5 bytes")


def test_a_page_in_place_of_an_index_is_not_kept(tmp_path: Path) -> None:
    """A training would take it for the index of the tar, and refuse it."""
    with serving_tree({"/x.tar": b"tar", "/x.tar.index": b"not found, sorry"}) as (url, _):
        fetch_urls([f"{url}/x.tar"], Request(tmp_path, FAST, environ=NOWHERE))
    assert (tmp_path / "x.tar").read_bytes() == b"tar"
    assert not (tmp_path / "x.tar.index").exists()


def test_an_index_of_an_absurd_size_is_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataset.fetch.index_beside.MAX_INDEX_BYTES", 10)
    with serving_tree({"/x.tar": b"tar", "/x.tar.index": b"x" * 11}) as (url, gets):
        fetch_urls([f"{url}/x.tar"], Request(tmp_path, FAST, environ=NOWHERE))
    assert gets.count("/x.tar.index") == 1  # its size


def test_what_a_kill_after_the_final_name_left_in_a_collection_is_removed(tmp_path: Path) -> None:
    content = bytes(SMALL_BYTES + 1)
    request = Request(tmp_path, FAST, environ=NOWHERE)
    with serving_tree({"/d/x": content}) as (url, _):
        fetch_urls([f"{url}/d/"], request)
        journal_path(tmp_path / "d" / "x").write_text("{}")
        fetch_urls([f"{url}/d/"], request)
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["x"]


def test_one_absurd_size_in_a_listing_is_not_a_lack_of_space(tmp_path: Path) -> None:
    class Lying(dav_server.TreeHandler):
        num_asked = 0

        def answer(self, status: int, body: bytes) -> None:
            if self.command == "PROPFIND":
                Lying.num_asked += 1
                lie = body.replace(b"<D:getcontentlength>3<", b"<D:getcontentlength>%d<" % 10**17)
                body = lie if Lying.num_asked == 1 else body
            super().answer(status, body)

    files, folders = {"/d/x": b"abc"}, frozenset({"/d"})
    with running(Lying, files=files, folders=folders, gets=[]) as url:
        fetch_urls([f"{url}/d/"], Request(tmp_path, FAST, environ=NOWHERE))
    assert (tmp_path / "d" / "x").read_bytes() == b"abc"
    assert Lying.num_asked == 2
