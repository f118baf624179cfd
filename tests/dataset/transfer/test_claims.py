"""What a journal claims of an earlier start is read again: no digest is made from its words."""

from __future__ import annotations

import base64
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dataset import checksum
from dataset.checksum import compute
from dataset.fetch.digests import pick_kinds
from dataset.own_names import journal_path, part_path
from dataset.transfer.journal import (
    CHUNK,
    read_journal,
)
from tests.dataset.object_fetch import CONTENT, HELD, fetch, leave_partial, make_index
from tests.dataset.small_server import Handler, running, serving

CRC32 = {"crc32": f"{zlib.crc32(CONTENT):08x}"}


class WithDigest(Handler):
    """Offers the crc32c of the object to HEAD, as XRootD does."""

    def do_HEAD(self) -> None:
        value = compute("crc32c", self.content).to_bytes(4, "big")
        self.send_response(200)
        self.send_header("Digest", f"crc32c={base64.b64encode(value).decode()}")
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextmanager
def serving_with_digest() -> Iterator[str]:
    with running(WithDigest, content=CONTENT, seen=[]) as place:
        yield f"{place}/object.bin"


def flip_a_byte(path: Path) -> None:
    with open(part_path(path), "r+b") as file:
        file.seek(2 * CHUNK + 5)
        file.write(bytes([CONTENT[2 * CHUNK + 5] ^ 1]))


def name_another_chunk(path: Path) -> None:
    journal = journal_path(path)
    journal.write_text(journal.read_text().replace('["ok",5,', '["ok",6,'))


def name_another_checksum(path: Path) -> None:
    journal = journal_path(path)
    lines = [line for line in journal.read_text().splitlines() if not line.startswith('["ok",5,')]
    journal.write_text("\n".join([*lines, '["ok",5,0' + ",7" * lines[0].count("crc") + "]", ""]))


DAMAGES = [flip_a_byte, name_another_chunk, name_another_checksum]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("proof", ["given", "server", "index", "none"])
def test_damage_of_the_partial_file_or_its_journal_is_mended(
    proof: str, damage: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "out" / "object.bin"
    path.parent.mkdir()
    given = CRC32 if proof == "given" else {}
    index = make_index(tmp_path, CONTENT) if proof == "index" else None
    with serving_with_digest() as url:
        leave_partial(path, url, pick_kinds(given))
        damage(path)
        summary = fetch(url, path.parent, given=given, index=index)
    assert path.read_bytes() == CONTENT
    assert summary.resumed_bytes == (len(HELD) - 1) * CHUNK
    assert summary.fetched_bytes == len(CONTENT) - summary.resumed_bytes
    assert any("damaged" in note for note in summary.notes)


def test_what_is_right_on_the_disk_is_not_fetched_again(tmp_path: Path) -> None:
    with serving_with_digest() as url:
        leave_partial(tmp_path / "object.bin", url, pick_kinds(CRC32))
        summary = fetch(url, tmp_path, given=CRC32)
    assert (tmp_path / "object.bin").read_bytes() == CONTENT
    assert summary.resumed_bytes == len(HELD) * CHUNK
    assert summary.fetched_bytes == len(CONTENT) - summary.resumed_bytes
    assert summary.verified == ["crc32 (given)"]


def test_a_part_that_is_shorter_than_the_journal_says_is_not_believed(tmp_path: Path) -> None:
    with serving_with_digest() as url:
        leave_partial(tmp_path / "object.bin", url, pick_kinds({}))
        os.truncate(part_path(tmp_path / "object.bin"), 2 * CHUNK)
        fetch(url, tmp_path)
    assert (tmp_path / "object.bin").read_bytes() == CONTENT


def test_a_digest_that_cannot_be_computed_here_is_no_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start before had the crc32c package."""
    monkeypatch.setattr(checksum, "HAS_CRC32C", False)
    monkeypatch.setattr(checksum, "crc32c", None)
    with serving(CONTENT) as (url, _):
        leave_partial(tmp_path / "object.bin", url, ("crc32", "adler32"))
        with open(journal_path(tmp_path / "object.bin"), "a") as journal:
            journal.write('["digest","crc32c","01234567"]\n')
        summary = fetch(url, tmp_path)
    assert (tmp_path / "object.bin").read_bytes() == CONTENT
    assert summary.verified == []


HOSTILE_LINES = [
    '["no",0,99999999999999]',
    '["no",-5,3]',
    '["ok",1e400,0,1]',
    '["ok",true,0,1]',
    '["ok",1,99999,1]',
    '["ok",1,0,1e400]',
    '["ok",1,0,' + "9" * 5000 + "]",
    '["ok",1,0,-1]',
    '["source",5]',
    '["digest",["x"],"y"]',
    '["digest","sha3","00"]',
    '["digest","md5","no hex"]',
    "[" * 100_000,
    '{"ok":1}',
    "null",
    "[]",
]


@pytest.mark.parametrize("line", HOSTILE_LINES, ids=lambda line: line[:24])
def test_a_hostile_line_neither_crashes_nor_lasts(line: str, tmp_path: Path) -> None:
    path = tmp_path / "object.bin"
    leave_partial(path, "http://a/object.bin", ("crc32",))
    with open(journal_path(path), "a") as journal:
        journal.write(f"{line}\n")
    arrivals = read_journal(journal_path(path))
    assert arrivals is not None
    assert arrivals.digests == {}
    assert sorted(arrivals.chunks) == ([] if line.startswith('["no",0') else list(HELD))


@pytest.mark.parametrize("size", ["-1", "1e400", "9" * 5000, "true", '"5"', "[" * 5000])
def test_a_head_with_an_absurd_size_vouches_for_nothing(size: str, tmp_path: Path) -> None:
    path = tmp_path / "object.bin"
    leave_partial(path, "http://a/object.bin", ("crc32",))
    journal = journal_path(path)
    text = journal.read_text()
    journal.write_text(text.replace(f'"size":{len(CONTENT)}', f'"size":{size}'))
    assert read_journal(journal) is None
