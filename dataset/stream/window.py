"""The transfer of an object of which only a window is held, in memory; a reader moves it on.

The engine is the one of a fetch, with its caches, hedges and checks. What differs is the map of
chunks, which offers nothing beyond the window, and the store, which is a ring and not a file.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from dataset.federation.lookup import Lookup
from dataset.federation.servers import Server
from dataset.transfer.blocks import BLOCK_CHUNKS, BlockMap, Lease
from dataset.transfer.journal import CHUNK, Arrivals, Journal, chunk_length
from dataset.transfer.store import ChunkStore

WINDOW_CHUNKS = 128  # MiB: with 1.3 million names beside it, less than 500 MB in all
POLL_S = 0.05


class TransferEnded(Exception):
    """The transfer has ended; the reader does too."""


class WindowMap(BlockMap):
    """The chunks of an object, of which only those in the window may be fetched."""

    def __init__(self, size: int, first: int, window: int) -> None:
        super().__init__(size, arrived=range(first))
        self.window, self.num_freed = window, first
        for chunk in range(first):
            self.mark_done(chunk)

    @property
    def limit(self) -> int:
        """The end of the window."""
        return self.num_freed + self.window

    def iter_waiting(self) -> Iterator[Lease]:
        return (lease for lease in super().iter_waiting() if lease.first < self.limit)

    def take(self, max_chunks: int, found: Lease | None = None) -> Lease:
        found = found or self.peek()
        assert found is not None
        return super().take(min(max_chunks, self.limit - found.first), found)

    def block_chunks(self, rate: float, connections: int) -> int:
        """As for a whole object, but so that the window has work for every connection."""
        share = self.window // (2 * connections)
        return min(super().block_chunks(rate, connections), max(BLOCK_CHUNKS, share))


class NoJournal(Journal):
    """A ring in memory has nothing to write down."""

    def __init__(self) -> None:
        super().__init__(Path("window"), -1)

    def add_source(self, name: str) -> None:
        pass

    def add_digest(self, kind: str, value: str) -> None:
        pass

    def add_etag(self, place: str, value: str) -> None:
        pass

    def add_chunk(self, chunk: int, source: int, checksums: Sequence[int]) -> None:
        pass

    def drop_chunks(self, first: int, end: int) -> None:
        pass

    def doubt(self) -> None:
        pass

    def sync(self) -> None:
        pass


class WindowStore(ChunkStore):
    """The chunks [first, first + window) of an object; the checksums of all since its start."""

    def __init__(self, arrivals: Arrivals, lookup: Lookup, first: int, window: int) -> None:
        self.has_news = threading.Event()
        self._ring = mmap.mmap(-1, window * CHUNK)
        super().__init__(-1, NoJournal(), arrivals, lookup.lock, lookup.servers)
        self.window_map = self.blocks = WindowMap(arrivals.size, first, window)

    def view(self, chunk: int) -> memoryview:
        """Where the bytes of a chunk in the window are."""
        start = chunk % self.window_map.window * CHUNK
        return memoryview(self._ring)[start : start + chunk_length(chunk, self.blocks.size)]

    def free(self, chunk: int) -> None:
        """The chunk was read: another one may take its place."""
        with self._lock:
            self.window_map.num_freed = chunk + 1

    def sync(self) -> None:
        pass

    def close(self) -> None:
        """Gives the memory back."""
        with suppress(BufferError):
            self._ring.close()

    def _place(self, chunk: int, server: Server, view: memoryview, values: Sequence[int]) -> int:
        self.view(chunk)[:] = view
        return self._number(server)

    def _check(self, chunks: range) -> None:
        super()._check(chunks)
        self.has_news.set()


class WindowReader:
    """Reads an object at growing positions while it arrives; each chunk goes to `take`, in order.

    `chunk` is the first one that did not.
    """

    def __init__(self, store: WindowStore, first: int, take: Callable[[memoryview], None]) -> None:
        self.chunk = first
        self._store, self._take = store, take
        self._stop = threading.Event()

    def pread(self, length: int, offset: int) -> bytes:
        """Bytes at an offset that is not before the last one; fewer at the end."""
        pieces = []
        end = min(offset + length, self._store.blocks.size)
        while offset < end:
            chunk, start = divmod(offset, CHUNK)
            self._pass(chunk)
            self._wait_for(chunk)
            piece = bytes(self._store.view(chunk)[start : start + end - offset])
            pieces.append(piece)
            offset += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def finish(self) -> None:
        """Takes in what is left."""
        self._pass(self._store.blocks.num_chunks)

    def stop(self) -> None:
        """Makes a reader that waits, or will, raise TransferEnded."""
        self._stop.set()
        self._store.has_news.set()

    def _pass(self, end: int) -> None:
        while self.chunk < end:
            self._wait_for(self.chunk)
            self._take(self._store.view(self.chunk))
            self._store.free(self.chunk)
            self.chunk += 1

    def _wait_for(self, chunk: int) -> None:
        assert chunk >= self.chunk, "a stream cannot be read backwards"
        while self._store.blocks.prefix <= chunk:
            self._store.has_news.clear()
            if self._stop.is_set():
                raise TransferEnded
            if self._store.blocks.prefix <= chunk:
                self._store.has_news.wait(POLL_S)
