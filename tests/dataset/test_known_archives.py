"""The published archives are verified by the sums that we ship, without being asked to."""

from __future__ import annotations

import csv
import hashlib
import json
import logging
import sys
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from dataset import known_archives
from dataset.archive.index import build_index
from dataset.errors import DataError
from dataset.federation.lookup import Options
from dataset.fetch.request import Request
from dataset.fetch.urls import fetch_urls
from dataset.known_archives import published_archives
from scripts import index_tar
from tests.dataset.tars import make_tree, write_nested

ROOT = Path(__file__).resolve().parents[2]
NAME = "ILSVRC2012_img_train.tar"


@pytest.fixture
def tar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small tar that stands for the real one: the table has its size and MD5."""
    source = tmp_path / "source"
    source.mkdir()
    tar = write_nested(source, make_tree()).rename(source / NAME)
    data = tar.read_bytes()
    md5, sha256 = hashlib.md5(data).hexdigest(), hashlib.sha256(data).hexdigest()
    known = known_archives.PublishedArchive(NAME, len(data), md5, sha256, 3, 18)
    monkeypatch.setattr(known_archives, "published_archives", lambda: {len(data): known})
    return tar


def flip_a_byte_of_an_image(tar: Path) -> None:
    data = bytearray(tar.read_bytes())
    data[1100] ^= 1  # no header tells
    tar.write_bytes(data)


def fetch(tar: Path, out: Path, **options: bool) -> list[str]:
    (summary,) = fetch_urls([tar.as_uri()], Request(out, Options(**options)))
    return summary.verified


def test_the_table_in_the_code_is_the_published_one() -> None:
    with open(ROOT / "run_results/published/ilsvrc2012_archives.csv", newline="") as file:
        rows = [tuple(row.values()) for row in csv.DictReader(file)]
    assert rows == [tuple(map(str, astuple(row))) for row in published_archives().values()]


def test_a_fetch_verifies_a_published_archive_unasked(tar: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert fetch(tar, out) == ["md5 (published)"]
    *_, line = (out / "fetched.jsonl").read_text().splitlines()
    assert json.loads(line)["digests"]["md5"] == hashlib.md5(tar.read_bytes()).hexdigest()
    assert fetch(tar, out) == ["md5 (published)"]  # again: it is known, nobody is asked


def test_wrong_bytes_of_a_published_archive_never_get_its_name(tar: Path, tmp_path: Path) -> None:
    flip_a_byte_of_an_image(tar)
    with pytest.raises(DataError, match="published"):
        fetch(tar, tmp_path / "out")
    assert not (tmp_path / "out" / NAME).exists()


def test_a_users_own_digest_comes_before_the_published_one(tar: Path, tmp_path: Path) -> None:
    flip_a_byte_of_an_image(tar)
    own = {"md5": hashlib.md5(tar.read_bytes()).hexdigest()}
    (summary,) = fetch_urls([tar.as_uri()], Request(tmp_path / "out", given=own))
    assert summary.verified == ["md5 (given)"]


def test_a_published_archive_that_lies_there_already_is_taken_when_it_is_right(
    tar: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / NAME).write_bytes(tar.read_bytes())
    assert fetch(tar, out) == ["md5 (published)"]
    other = tmp_path / "other"
    other.mkdir()
    (other / NAME).write_bytes(tar.read_bytes())
    flip_a_byte_of_an_image(other / NAME)
    with pytest.raises(DataError, match="move it away"):
        fetch(tar, other)


def test_an_index_with_checksums_verifies_a_published_archive(tar: Path) -> None:
    build_index(tar, checksums=True)
    tar.with_name(NAME + ".index").unlink()
    flip_a_byte_of_an_image(tar)
    with pytest.raises(DataError, match="the published archive of its name and size"):
        build_index(tar, checksums=True)
    assert not tar.with_name(NAME + ".index").exists()


@pytest.mark.parametrize(
    ("flags", "told"),
    [((), "only its headers were read"), (("--checksums",), "its MD5 is the published one")],
)
def test_the_index_command_says_whether_it_verified_a_published_archive(
    flags: tuple[str, ...],
    told: str,
    tar: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(sys, "argv", ["index_tar.py", *flags, str(tar)])
    assert index_tar.main() == 0
    assert f"{tar}: {told}" in caplog.text
    caplog.clear()
    monkeypatch.setattr(
        sys, "argv", ["index_tar.py", *flags, str(tar.rename(tar.parent / "x.tar"))]
    )
    assert index_tar.main() == 0
    assert "MD5" not in caplog.text


def test_what_has_no_digest_is_taken_and_said_or_refused_on_request(tmp_path: Path) -> None:
    plain = tmp_path / "plain.bin"
    plain.write_bytes(b"bytes" * 1000)
    out = tmp_path / "out"
    with pytest.raises(DataError, match="--require-digest"):
        fetch(plain, out, require_digest=True)
    assert not (out / "plain.bin").exists()
    assert fetch(plain, out) == []
    with pytest.raises(DataError, match="--require-digest"):  # fetched, and still not verified
        fetch(plain, out, require_digest=True)


def test_another_name_or_size_is_no_published_archive(tar: Path, tmp_path: Path) -> None:
    other = tar.with_name("mine.tar")
    other.write_bytes(tar.read_bytes())
    assert fetch(other, tmp_path / "out") == []
    known = known_archives.find_published(NAME, tar.stat().st_size)
    assert known is not None and replace(known, file="x") != known
    assert known_archives.find_published(NAME, tar.stat().st_size + 1) is None


@pytest.mark.parametrize("is_right", [True, False])
def test_a_published_archive_that_an_earlier_version_left_unverified_is_verified(
    is_right: bool, tar: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    fetch(tar, out)
    if not is_right:
        flip_a_byte_of_an_image(out / NAME)
    stat = (out / NAME).stat()
    before = {"name": NAME, "object": tar.as_uri(), "size": stat.st_size, "verified": []}
    (out / "fetched.jsonl").write_text(json.dumps({**before, "mtime_ns": stat.st_mtime_ns}) + "\n")
    tar.unlink()  # nobody is asked for it
    if is_right:
        assert fetch(tar, out) == fetch(tar, out) == ["md5 (published)"]
    else:
        with pytest.raises(DataError, match="md5"):
            fetch(tar, out)
