"""Much wrong from one of several caches, where only a digest of the whole tells."""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest

from dataset.durable import write_at
from dataset.errors import DataError
from dataset.federation.connection import Pool
from dataset.federation.framing import ProtocolError
from dataset.federation.lookup import Options
from dataset.federation.servers import Server
from dataset.fetch import digests, size, verify
from dataset.fetch.digests import DigestAsker, ServerDigest
from dataset.fetch.request import Request, Summary
from dataset.fetch.urls import fetch_urls
from dataset.transfer.engine import ObjectChanged
from dataset.transfer.journal import CHUNK, Arrivals
from tests.dataset.director_server import federation
from tests.dataset.object_fetch import NOWHERE
from tests.dataset.small_server import Handler, serving

FAST = Options(stall_s=5.0, give_up_s=20.0, missing_s=0.5, connections=4)
SIZE = 32 * CHUNK
CONTENT = np.random.default_rng(1).bytes(SIZE)
MAX_DIFFERENT = 3  # less than one lease
MD5 = hashlib.md5(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def few_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a cache's share of a small object is too much, however the load is spread."""
    monkeypatch.setattr(verify, "MAX_DIFFERENT", MAX_DIFFERENT)


def damage(content: bytes, at: int = 3) -> bytes:
    """The content with one byte of every MiB flipped."""
    damaged = bytearray(content)
    for offset in range(at, len(content), CHUNK):
        damaged[offset] ^= 0xFF
    return bytes(damaged)


def fetch(director: str, out: Path, md5: str = MD5) -> Summary:
    request = Request(out, FAST, federation=director, given={"md5": md5}, environ=NOWHERE)
    (summary,) = fetch_urls(["osdf:///object.bin"], request)
    return summary


def check_books(summary: Summary) -> None:
    """Every byte is counted, at its source and, if it came twice, by its cause."""
    twice = sum(summary.bytes_twice.values())
    assert summary.fetched_bytes == summary.size - summary.resumed_bytes + twice
    assert sum(server["bytes"] for server in summary.sources) == summary.fetched_bytes


@pytest.mark.parametrize("has_origin", [True, False], ids=["origin", "no_origin"])
@pytest.mark.parametrize("wrong", [0, 1], ids=["nearest_is_wrong", "nearest_is_right"])
def test_the_one_of_two_caches_that_corrupts_is_found(
    wrong: int, has_origin: bool, tmp_path: Path
) -> None:
    caches = [CONTENT, CONTENT]
    caches[wrong] = damage(CONTENT)
    with federation(caches, CONTENT if has_origin else None) as (director, *places):
        summary = fetch(director, tmp_path)
    assert (tmp_path / "object.bin").read_bytes() == CONTENT
    assert not any("starting over" in note for note in summary.notes)
    refused = [server["source"] for server in summary.sources if server["refused"]]
    assert refused == [places[wrong]]
    check_books(summary)
    if has_origin:  # it tells at once who is wrong: nothing that was right is fetched again
        (bad,) = [s for s in summary.sources if s["source"] == places[wrong]]
        assert 0 < summary.bytes_twice["wrong"] <= bad["bytes"]
        assert bad["wrong_blocks"] > MAX_DIFFERENT


def test_an_origin_that_corrupts_gives_way_to_a_cache_that_does_not(tmp_path: Path) -> None:
    caches = [damage(CONTENT, at=3), CONTENT]
    with federation(caches, damage(CONTENT, at=4)) as (director, *places):
        summary = fetch(director, tmp_path)
    assert (tmp_path / "object.bin").read_bytes() == CONTENT
    assert places[1] not in [server["source"] for server in summary.sources if server["refused"]]
    check_books(summary)


def test_chunks_of_an_object_that_was_another_one_do_not_speak_against_its_caches(
    tmp_path: Path,
) -> None:
    caches = [CONTENT[::-1]] * 2
    with federation(caches) as (director, *_):
        with pytest.raises(DataError):
            fetch(director, tmp_path)  # it has another md5: the partial file is kept
        caches[:] = [CONTENT] * 2
        summary = fetch(director, tmp_path)
    assert (tmp_path / "object.bin").read_bytes() == CONTENT
    assert summary.resumed_bytes == SIZE
    assert not any(server["refused"] for server in summary.sources)
    check_books(summary)


def test_sources_that_all_corrupt_are_exit_3_and_named(tmp_path: Path) -> None:
    caches = [damage(CONTENT, at=3), damage(CONTENT, at=4)]
    with federation(caches) as (director, *places), pytest.raises(DataError) as caught:
        fetch(director, tmp_path)
    assert "fails verification" in str(caught.value)
    (summary,) = caught.value.summaries  # type: ignore[attr-defined]
    assert {server["source"] for server in summary.sources} == set(places)
    assert all(any(f"{place}: other bytes" in n for n in summary.notes) for place in places)
    check_books(summary)
    assert not (tmp_path / "object.bin").exists()


def test_a_disk_that_fails_while_wrong_bytes_are_replaced_is_an_error_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []

    def fail_late(fd: int, view: memoryview, offset: int) -> None:  # a fake: no disk here fails
        written.append(offset)
        if len(written) > SIZE // CHUNK:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        write_at(fd, view, offset)

    monkeypatch.setattr("dataset.transfer.store.write_at", fail_late)
    with federation([damage(CONTENT), CONTENT]) as (director, *_), pytest.raises(OSError) as caught:
        fetch(director, tmp_path)
    assert caught.value.errno == errno.EIO


def test_one_cache_with_another_size_does_not_throw_away_what_is_here(tmp_path: Path) -> None:
    caches = [CONTENT]
    with federation(caches, CONTENT) as (director, *_):
        with pytest.raises(DataError):
            fetch(director, tmp_path, md5="0" * 32)  # the partial file is kept, whole
        caches[:] = [CONTENT[: 10 * CHUNK]]
        summary = fetch(director, tmp_path)
    assert (tmp_path / "object.bin").read_bytes() == CONTENT
    assert (summary.resumed_bytes, summary.fetched_bytes) == (SIZE, 0)


def test_an_object_that_really_has_another_size_is_fetched_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(size, "DOUBT_S", 1.0)  # no origin is there to be waited for
    content = CONTENT[: 10 * CHUNK]
    with federation([CONTENT]) as (director, *_), pytest.raises(DataError):
        fetch(director, tmp_path, md5="0" * 32)
    with federation([content]) as (director, *_):
        fetch(director, tmp_path, md5=hashlib.md5(content).hexdigest())
    assert (tmp_path / "object.bin").read_bytes() == content


def test_a_reference_that_fails_is_left_after_a_few_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "RUN_CHUNKS", 2)
    asked = []

    def fail(lookup: object, store: object, reference: Server, *run: int) -> None:
        asked.append(reference.label)
        raise OSError("refused")

    monkeypatch.setattr(verify, "_compare_run", fail)
    with federation([CONTENT], CONTENT) as (director, *places), pytest.raises(DataError):
        fetch(director, tmp_path, md5="0" * 32)
    # The origin alone, unless the cache was slow and the origin sent a part: then the cache, too.
    assert set(asked) <= set(places)
    assert max(Counter(asked).values()) == verify.MAX_FAILURES


@pytest.mark.parametrize("start", ["HTTP/1.1 206 OK\r\n", "HTTP/1.1 206 OK\r\n{}\r\n\r\n"])
def test_an_answer_that_drips_is_given_up_while_comparing(start: str) -> None:
    head = f"Content-Length: {CHUNK}\r\nContent-Range: bytes 0-{CHUNK - 1}/{CHUNK}"

    def drip(handler: Handler) -> bool:
        handler.close_connection = True
        with suppress(OSError):
            handler.wfile.write(start.format(head).encode())
            while True:
                handler.wfile.write(b"X: y\r\n")
                time.sleep(0.02)
        return True

    lookup, store = MagicMock(), MagicMock()
    lookup.pool, lookup.options.stall_s, store.blocks.size = Pool(5.0), 0.2, CHUNK
    lookup.headers.return_value = {}
    with serving(b"", drip) as (url, _), pytest.raises(ProtocolError, match="stalled"):
        verify._compare_run(lookup, store, Server(url, "cache"), 0, 1)


def test_a_digest_of_an_earlier_start_counts_when_nobody_tells_one_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or a partial file of the old object would be completed with bytes of a new one."""
    monkeypatch.setattr(digests, "ask_digest", lambda *_: None)
    transfer = MagicMock()
    transfer.store.sums.kinds = ("crc32c",)
    known = Arrivals("osdf:///object.bin", SIZE, ("crc32c",), "", digests={"md5": "a" * 32})
    assert DigestAsker(transfer, known).wait() == ("md5", "a" * 32, "an earlier start", False)


@pytest.mark.parametrize("is_origin", [True, False])
def test_only_the_origins_digest_tells_that_the_object_changed(
    is_origin: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache's digest is that of its own copy, which may be a damaged one."""
    other = ServerDigest("md5", "b" * 32, "somewhere", is_origin)
    monkeypatch.setattr(digests, "ask_digest", lambda *_: other)
    transfer = MagicMock()
    transfer.store.sums.kinds = ("crc32c",)
    known = Arrivals("osdf:///object.bin", SIZE, ("crc32c",), "", digests={"md5": "a" * 32})
    asker = DigestAsker(transfer, known)
    if is_origin:  # also when the last byte came before the answer
        with pytest.raises(ObjectChanged):
            asker.wait()
    else:
        found = asker.wait()
        assert found is not None and found.value == "a" * 32
    assert transfer.fail.called == is_origin
