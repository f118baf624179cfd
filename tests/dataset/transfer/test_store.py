"""Chunks on their way to the disk: what its errors and wrong blocks leave behind."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dataset import checksum
from dataset.errors import DataError, run_command
from dataset.federation.lookup import Options
from dataset.federation.servers import Servers
from dataset.fetch.request import Request, Summary
from dataset.fetch.urls import fetch_urls
from dataset.own_names import PART, journal_path, part_path
from dataset.transfer.blocks import DONE, MISSING
from dataset.transfer.chunk_sums import BlockChecks
from dataset.transfer.journal import CHUNK, Arrivals, Journal, read_journal
from dataset.transfer.store import MIN_BLOCK_TRIES, ChunkStore, DiskError
from tests.dataset.director_server import federation
from tests.dataset.object_fetch import NOWHERE, make_index
from tests.dataset.small_server import Handler, serving

FAST = Options(stall_s=5.0, give_up_s=20.0, missing_s=0.5, connections=4)
CONTENT = np.random.default_rng(2).bytes(16 * CHUNK)
ZEROS = memoryview(bytes(CHUNK))


def make_store(path: Path, num_sources: int = 2, checks: BlockChecks | None = None) -> ChunkStore:
    fd = os.open(part_path(path), os.O_RDWR | os.O_CREAT)
    arrivals = Arrivals("pelican://f/x", 4 * CHUNK, ("crc32c",), "boot")
    journal = Journal.create(journal_path(path), arrivals)
    servers = Servers(3, random.Random(0))
    servers.update([f"http://c{n}/x" for n in range(num_sources)], wants_token=False)
    store = ChunkStore(fd, journal, arrivals, threading.RLock(), servers, checks)
    store.blocks.take(4)  # all of it is being fetched
    return store


def close(store: ChunkStore) -> None:
    store.journal.close()
    os.close(store.fd)


def fill_disk(store: ChunkStore) -> None:
    """From here on the journal has no space: the kernel's /dev/full is a real ENOSPC."""
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, store.journal._fd)
    os.close(full)


def fail_with_eio(fd: int) -> None:
    """A fake fsync: no disk here fails."""
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize(("call", "method"), [("fdatasync", "sync"), ("fsync", "flush")])
def test_after_a_failed_sync_the_journal_is_doubted(
    call: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "x")
    store.write(0, store._servers.all[0], ZEROS, (7,))
    monkeypatch.setattr(os, call, fail_with_eio)
    with pytest.raises(DiskError) as caught:
        getattr(store, method)()
    monkeypatch.undo()
    close(store)
    assert caught.value.error.filename == str(part_path(tmp_path / "x"))
    arrivals = read_journal(journal_path(tmp_path / "x"))
    assert arrivals is not None
    assert arrivals.boot_id == ""
    assert arrivals.chunks == {0: (0, (7,))}


def test_a_journal_without_space_is_an_error_of_the_disk_and_the_books_stay_right(
    tmp_path: Path,
) -> None:
    store = make_store(tmp_path / "x")
    fill_disk(store)
    with pytest.raises(DiskError, match="No space left"):
        store.write(0, store._servers.all[0], ZEROS, (0,))
    assert store.num_writing == 0
    assert store.blocks.state[0] == MISSING
    close(store)
    assert read_journal(journal_path(tmp_path / "x")).boot_id == ""  # type: ignore[union-attr]


@pytest.mark.parametrize("method", ["replace", "drop_from", "refetch"])
def test_a_chunk_that_cannot_be_dropped_is_an_error_of_the_disk(
    method: str, tmp_path: Path
) -> None:
    store = make_store(tmp_path / "x", checks=BlockChecks(CHUNK, [0] * 4, "x.index", "crc32c"))
    server = store._servers.all[0]
    store._number(server)
    if method != "refetch":
        store.checks = None
        store.write(0, server, ZEROS, (7,))
    add_chunk = store.journal.add_chunk

    def add_and_fill(chunk: int, number: int, values: tuple[int, ...]) -> None:
        add_chunk(chunk, number, values)
        fill_disk(store)

    with pytest.raises(DiskError, match="No space left"):
        if method == "refetch":
            store.journal.add_chunk = add_and_fill  # type: ignore[method-assign,assignment]
            store.write(0, server, ZEROS, (7,))
        fill_disk(store)
        if method == "replace":
            store.replace(0, server, ZEROS, (8,))
        store.drop_from({server.label})
    assert store.num_writing == 0
    close(store)


def test_a_block_avoids_all_that_sent_it_wrong(tmp_path: Path) -> None:
    store = make_store(tmp_path / "x", 3, BlockChecks(CHUNK, [1] * 4, "x.index", "crc32c"))
    a, b, c = store._servers.all
    store.write(0, a, ZEROS, (7,))
    assert store.blocks.take(1).avoid == {a}
    store.write(0, b, ZEROS, (7,))
    assert store.blocks.take(1).avoid == {a, b}
    store.write(0, c, ZEROS, (1,))
    assert store.blocks.state[0] == DONE
    close(store)


def test_a_block_is_given_up_when_every_source_sent_it_wrong(tmp_path: Path) -> None:
    store = make_store(tmp_path / "x", 2, BlockChecks(CHUNK, [1] * 4, "x.index", "crc32c"))
    a, b = store._servers.all
    for n in range(MIN_BLOCK_TRIES):
        store.write(0, (a, b)[n % 2], ZEROS, (7,))  # the origin may be right
    store._servers.are_all = True
    store._servers.update(["http://origin/x"], wants_token=False, is_origin=True)
    store.write(0, a, ZEROS, (7,))
    with pytest.raises(DataError, match="every source"):
        store.write(0, store._servers.all[2], ZEROS, (7,))
    close(store)


def test_a_source_of_a_mixed_block_may_be_innocent(tmp_path: Path) -> None:
    store = make_store(tmp_path / "x", 2, BlockChecks(2 * CHUNK, [1, 1], "x.index", "crc32c"))
    a, b = store._servers.all
    for _ in range(3):
        store.write(0, a, ZEROS, (7,))
        store.write(1, b, ZEROS, (7,))
    waiting = store.blocks.peek()
    assert waiting is not None and waiting.avoid == frozenset()
    assert not a.refused and not b.refused
    close(store)


def fetch(url: str, out: Path, **fields: object) -> Summary:
    request = Request(out, FAST, environ=NOWHERE)
    (summary,) = fetch_urls([url], replace(request, **fields))  # type: ignore[arg-type]
    return summary


@pytest.mark.parametrize("has_wheel", [True, False])
def test_blocks_of_today_are_checked_with_and_without_the_crc32c_package(
    has_wheel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = make_index(tmp_path, CONTENT, "crc32")
    if not has_wheel:
        monkeypatch.setattr(checksum, "HAS_CRC32C", False)
        monkeypatch.setattr(checksum, "crc32c", None)
    (tmp_path / "object.bin").write_bytes(CONTENT)
    url = (tmp_path / "object.bin").as_uri()
    summary = fetch(url, tmp_path / "out", index=index)
    assert summary.verified == ["block_crc32 (object.bin.index)"]
    (tmp_path / "object.bin").write_bytes(CONTENT[:-1] + bytes([CONTENT[-1] ^ 1]))
    with pytest.raises(DataError, match=r"differ from object\.bin\.index"):
        fetch(url, tmp_path / "other", index=index)


def test_a_slot_without_the_crc32c_package_verifies_by_digest_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = make_index(tmp_path, CONTENT)
    monkeypatch.setattr(checksum, "HAS_CRC32C", False)
    monkeypatch.setattr(checksum, "crc32c", None)
    source = tmp_path / "object.bin"
    source.write_bytes(CONTENT)
    given = {"md5": hashlib.md5(CONTENT).hexdigest()}
    summary = fetch(source.as_uri(), tmp_path / "out", index=index, given=given)
    assert (tmp_path / "out" / "object.bin").read_bytes() == CONTENT
    assert summary.verified == ["md5 (given)"]
    told = [note for note in summary.notes if "block checksums are not used" in note]
    assert len(told) == 1 and "the crc32c package is not installed" in told[0]


@pytest.mark.parametrize("num_caches", [1, 2])
def test_a_block_that_every_cache_has_wrong_comes_from_the_origin(
    num_caches: int, tmp_path: Path
) -> None:
    wrong = bytearray(CONTENT)
    wrong[5 * CHUNK] ^= 0xFF
    index = make_index(tmp_path, CONTENT)
    with federation([bytes(wrong)] * num_caches, CONTENT) as (director, *_):
        summary = fetch("osdf:///object.bin", tmp_path / "out", federation=director, index=index)
    assert (tmp_path / "out" / "object.bin").read_bytes() == CONTENT
    assert summary.bytes_twice["wrong"] <= num_caches * 4 * CHUNK
    (origin,) = [s for s in summary.sources if not s["wrong_blocks"]]
    assert origin["bytes"] >= 4 * CHUNK


def test_a_block_that_the_origin_has_wrong_too_is_exit_3(tmp_path: Path) -> None:
    wrong = bytearray(CONTENT)
    wrong[5 * CHUNK] ^= 0xFF
    index = make_index(tmp_path, CONTENT)
    with (
        federation([bytes(wrong)] * 2, bytes(wrong)) as (director, *_),
        pytest.raises(DataError, match="every source"),
    ):
        fetch("osdf:///object.bin", tmp_path / "out", federation=director, index=index)
    assert not (tmp_path / "out" / "object.bin").exists()


@pytest.mark.parametrize("is_late", [False, True], ids=["midway", "when_all_is_here"])
def test_after_a_failed_sync_a_second_start_fetches_what_never_reached_the_disk(
    is_late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_syncing = threading.Event()
    sync = ChunkStore.sync

    def sync_slowly(store: ChunkStore) -> None:
        is_syncing.set()
        while is_late and not store.blocks.is_complete:
            time.sleep(0.001)
        sync(store)

    def wait_for_sync(handler: Handler) -> bool:
        if "bytes=0-" not in handler.headers.get("Range", ""):
            is_syncing.wait(10.0)
        return False

    monkeypatch.setattr("dataset.transfer.engine.SYNC_BYTES", CHUNK)
    monkeypatch.setattr(ChunkStore, "sync", sync_slowly)
    monkeypatch.setattr(os, "fdatasync", fail_with_eio)
    with serving(CONTENT, wait_for_sync) as (url, _):
        assert run_command(lambda: int(not fetch(url, tmp_path))) == 2
        monkeypatch.undo()
        before = read_journal(journal_path(tmp_path / "object.bin"))
        assert before is not None and before.chunks
        with open(part_path(tmp_path / "object.bin"), "r+b") as file:
            file.seek(min(before.chunks) * CHUNK)
            file.write(bytes(4096))  # the page that could not be written
        fetch(url, tmp_path)
    assert (tmp_path / "object.bin").read_bytes() == CONTENT
    assert sorted(path.name for path in tmp_path.glob(f"*{PART}*")) == []
