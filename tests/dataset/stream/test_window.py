"""Only the window is asked for, and the reader gets every byte of the object in order."""

from __future__ import annotations

import os
import threading
import time

import pytest

from dataset.federation.lookup import Lookup
from dataset.fetch.request import Request
from dataset.fetch.size import find_size
from dataset.stream.window import TransferEnded, WindowMap, WindowReader, WindowStore
from dataset.transfer.blocks import DONE, MISSING
from dataset.transfer.engine import Transfer
from dataset.transfer.journal import CHUNK, Arrivals
from tests.dataset.object_fetch import FAST, NOWHERE
from tests.dataset.small_server import serving

CONTENT = os.urandom(21 * CHUNK + 77)
WINDOW = 5


def test_nothing_beyond_the_window_is_handed_out() -> None:
    blocks = WindowMap(len(CONTENT), 2, WINDOW)
    assert (blocks.prefix, blocks.num_done) == (2, 2)
    (waiting,) = blocks.iter_waiting()
    lease = blocks.take(64, waiting)
    assert (lease.first, lease.end) == (2, 4), "whole blocks of 4 MiB"
    (waiting,) = blocks.iter_waiting()
    lease = blocks.take(64, waiting)
    assert lease.end <= blocks.limit == 7
    while (waiting := next(blocks.iter_waiting(), None)) is not None:  # type: ignore[assignment]
        assert blocks.take(64, waiting).end <= 7
    for chunk in range(2, 7):
        blocks.mark_done(chunk)
    assert next(blocks.iter_waiting(), None) is None
    blocks.num_freed = 4
    assert next(blocks.iter_waiting()).first == 7
    assert blocks.state[:7] == bytes([DONE] * 7) and blocks.state[7] == MISSING


def test_requests_leave_work_for_every_connection() -> None:
    assert WindowMap(1 << 40, 0, 192).block_chunks(1e9, 8) == 12
    assert WindowMap(1 << 40, 0, 16).block_chunks(1e9, 8) == 4


def test_a_slow_reader_gets_all_bytes_and_holds_the_transfer_back() -> None:
    """The ring has 5 MiB: the servers are not asked for more before the reader moves on."""
    taken: list[bytes] = []
    asked_ahead: list[int] = []
    highest = 0

    def note(handler: object) -> bool:
        nonlocal highest
        end = int(handler.headers["Range"].rpartition("-")[2]) + 1  # type: ignore[attr-defined]
        highest = max(highest, end)
        if end > (len(taken) + 1 + WINDOW) * CHUNK:  # an assertion here would end only a connection
            asked_ahead.append(end)
        return False

    with serving(CONTENT, note) as (url, _):
        request = Request(os.devnull, FAST, environ=NOWHERE)  # type: ignore[arg-type]
        with Lookup(request.parse(url), request.access, FAST) as lookup:
            size = find_size(lookup)
            store = WindowStore(Arrivals(url, size, ("crc32",), ""), lookup, 0, WINDOW)
            reader = WindowReader(store, 0, lambda view: taken.append(bytes(view)))
            pieces: list[bytes] = []

            def read() -> None:
                for offset in range(0, size, 300_000):
                    pieces.append(reader.pread(300_000, offset))
                    time.sleep(0.002)
                reader.finish()

            thread = threading.Thread(target=read)
            thread.start()
            Transfer(lookup, store).run()
            thread.join()
            store.close()
    assert b"".join(taken) == b"".join(pieces) == CONTENT
    assert highest == len(CONTENT) and asked_ahead == []


def test_a_reader_that_waits_can_be_stopped() -> None:
    request = Request(os.devnull, FAST, environ=NOWHERE)  # type: ignore[arg-type]
    target = request.parse("http://localhost:1/x")
    with Lookup(target, request.access, FAST) as lookup:
        store = WindowStore(Arrivals("x", CHUNK, ("crc32",), ""), lookup, 0, WINDOW)
        reader = WindowReader(store, 0, lambda view: None)
        threading.Timer(0.05, reader.stop).start()
        with pytest.raises(TransferEnded):
            reader.pread(512, 0)
