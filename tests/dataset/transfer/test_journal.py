"""What a journal promises after a kill: whole lines count, torn ones do not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dataset.checksum import compute
from dataset.own_names import doubted_path, journal_path, part_path
from dataset.transfer.journal import (
    CHUNK,
    Arrivals,
    Journal,
    chunk_length,
    num_chunks,
    read_journal,
)
from dataset.transfer.resume import discard, holding_part, resume

SIZE = 3 * CHUNK + 5


def make(path: Path, boot_id: str = "boot") -> Journal:
    return Journal.create(path, Arrivals("pelican://f/x", SIZE, ("crc32", "adler32"), boot_id))


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    journal = make(tmp_path / "j")
    journal.add_source("https://cache-a")
    journal.add_etag("https://cache-a", '"v1"')
    journal.add_chunk(2, 0, (7, 8))
    journal.add_chunk(0, 0, (5, 6))
    journal.add_digest("md5", "ab" * 16)
    journal.drop_chunks(2, 3)
    journal.close()
    arrivals = read_journal(tmp_path / "j")
    assert arrivals is not None
    assert arrivals.chunks == {0: (0, (5, 6))}
    assert arrivals.sources == ["https://cache-a"]
    assert arrivals.etags == {"https://cache-a": '"v1"'}
    assert arrivals.digests == {"md5": "ab" * 16}


def test_every_torn_end_loses_only_its_own_line(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = make(path)
    whole_after = {path.stat().st_size: 0}
    for chunk in range(3):
        journal.add_chunk(chunk, 0, (chunk, chunk))
        whole_after[path.stat().st_size] = chunk + 1
    journal.close()
    content = path.read_bytes()
    head_end = min(whole_after)
    for length in range(head_end, len(content) + 1):
        path.write_bytes(content[:length])
        arrivals = read_journal(path)
        assert arrivals is not None
        expected = max(num for end, num in whole_after.items() if end <= length)
        assert len(arrivals.chunks) == expected


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"{}\n", b'{"format": 9}\n', b"[1]\n"])
def test_a_file_that_is_no_journal_vouches_for_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "j").write_bytes(content)
    assert read_journal(tmp_path / "j") is None


def test_lines_that_do_not_fit_the_object_are_ignored(tmp_path: Path) -> None:
    journal = make(tmp_path / "j")
    journal.add_chunk(4, 0, (1, 1))  # past the end
    journal.add_chunk(1, 0, (1,))  # a checksum is missing
    journal.close()
    arrivals = read_journal(tmp_path / "j")
    assert arrivals is not None and arrivals.chunks == {}


def test_the_last_chunk_is_short() -> None:
    assert num_chunks(SIZE) == 4
    assert [chunk_length(n, SIZE) for n in range(4)] == [CHUNK, CHUNK, CHUNK, 5]
    assert num_chunks(0) == 0


def start(path: Path, content: bytes, boot_id: str) -> None:
    """A partial file whose journal vouches for its first two chunks."""
    part_path(path).write_bytes(content)
    journal = make(journal_path(path), boot_id)
    for chunk in range(2):
        view = content[chunk * CHUNK : (chunk + 1) * CHUNK]
        journal.add_chunk(chunk, 0, (compute("crc32", view), compute("adler32", view)))
    journal.close()


def test_after_a_reboot_journalled_bytes_are_checked_again(tmp_path: Path) -> None:
    path = tmp_path / "x"
    start(path, b"a" * SIZE, "another boot")  # then a page that never reached the disk
    with holding_part(path) as fd:
        os.pwrite(fd, b"\0", CHUNK)
    arrivals = resume(path, "pelican://f/x", SIZE, ("crc32", "adler32"), lambda text: None)
    assert sorted(arrivals.chunks) == [0]


def test_under_readers_the_chunks_of_another_boot_are_left_to_the_transfer_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come in the order of need; and a next start must doubt them again."""
    path = tmp_path / "x"
    forgotten: list[int] = []
    start(path, b"a" * SIZE, "another boot")
    monkeypatch.setattr("dataset.transfer.resume._forget_pages", forgotten.append)
    monkeypatch.setattr("dataset.transfer.resume._check_again", None)
    kinds = ("crc32", "adler32")
    arrivals = resume(path, "pelican://f/x", SIZE, kinds, lambda text: None, has_readers=True)
    assert sorted(arrivals.chunks) == [0, 1] and not arrivals.were_read
    assert len(forgotten) == 1 and arrivals.boot_id == "another boot"


def test_after_a_kill_the_chunks_are_left_to_the_transfer_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    monkeypatch.setattr("dataset.transfer.resume.read_boot_id", lambda: "boot")
    start(path, b"a" * SIZE, "boot")
    monkeypatch.setattr("dataset.transfer.resume._check_again", None)
    arrivals = resume(path, "pelican://f/x", SIZE, ("crc32", "adler32"), lambda text: None)
    assert sorted(arrivals.chunks) == [0, 1]
    assert not arrivals.were_read


def test_other_checksums_wanted_are_computed_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    start(path, b"a" * SIZE, "boot")
    arrivals = resume(path, "pelican://f/x", SIZE, ("adler32",), lambda text: None)
    assert [len(values) for _, values in arrivals.chunks.values()] == [1, 1]


@pytest.mark.parametrize(
    ("identity", "size", "reason"),
    [("pelican://f/y", SIZE, "belongs to"), ("pelican://f/x", SIZE + 1, "bytes")],
)
def test_a_partial_file_of_another_object_is_not_used_and_that_is_said(
    tmp_path: Path, identity: str, size: int, reason: str
) -> None:
    path = tmp_path / "x"
    start(path, b"a" * SIZE, "boot")
    said: list[str] = []
    assert resume(path, identity, size, ("crc32", "adler32"), said.append).chunks == {}
    assert reason in said[0] and "starting over" in said[0]


def test_without_a_package_a_checksum_is_taken_on_trust_only_within_one_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    monkeypatch.setattr("dataset.transfer.resume.read_boot_id", lambda: "boot")
    for boot_id, num_kept in (("boot", 2), ("another boot", 0)):
        start(path, b"a" * SIZE, boot_id)
        journal = journal_path(path)
        journal.write_text(journal.read_text().replace('"crc32","adler32"', '"unknown","adler32"'))
        arrivals = resume(path, "pelican://f/x", SIZE, ("crc32",), lambda text: None)
        assert len(arrivals.chunks) == num_kept


def test_discarding_removes_the_voucher_with_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x"
    start(path, b"a" * SIZE, "boot")
    discard(path)
    assert list(tmp_path.iterdir()) == []


def test_after_an_error_of_the_disk_journalled_bytes_are_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    monkeypatch.setattr("dataset.transfer.resume.read_boot_id", lambda: "boot")
    start(path, b"a" * SIZE, "boot")
    journal = Journal(journal_path(path), os.open(journal_path(path), os.O_WRONLY | os.O_APPEND))
    journal.doubt()
    journal.doubt()  # by another thread
    journal.close()
    with holding_part(path) as fd:
        os.pwrite(fd, b"\0", CHUNK)  # as if a page had never reached the disk
    arrivals = resume(path, "pelican://f/x", SIZE, ("crc32", "adler32"), lambda text: None)
    assert sorted(arrivals.chunks) == [0]
    Journal.create(journal_path(path), arrivals).close()
    assert not doubted_path(journal_path(path)).exists()
    again = resume(path, "pelican://f/x", SIZE, ("crc32", "adler32"), lambda text: None)
    assert again == arrivals


def test_a_journal_that_cannot_get_another_name_vouches_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Path, target: Path) -> None:  # a fake: no disk here fails
        raise OSError("no")

    journal = make(tmp_path / "j")
    journal.add_chunk(0, 0, (5, 6))
    monkeypatch.setattr(Path, "replace", fail)
    journal.doubt()
    journal.add_chunk(1, 0, (5, 6))  # a thread that does not know yet
    journal.close()
    assert read_journal(tmp_path / "j") is None


def test_a_chunk_that_cannot_be_read_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.preadv

    def fail(fd: int, views: list[memoryview], offset: int) -> int:  # a fake: no disk here fails
        if offset == CHUNK:
            raise OSError("no")
        return read(fd, views, offset)

    path = tmp_path / "x"
    start(path, b"a" * SIZE, "another boot")
    monkeypatch.setattr(os, "preadv", fail)
    arrivals = resume(path, "pelican://f/x", SIZE, ("crc32", "adler32"), lambda text: None)
    assert sorted(arrivals.chunks) == [0]


def test_discarding_removes_a_doubted_journal_too(tmp_path: Path) -> None:
    path = tmp_path / "x"
    start(path, b"a" * SIZE, "boot")
    journal_path(path).replace(doubted_path(journal_path(path)))
    discard(path)
    assert list(tmp_path.iterdir()) == []
