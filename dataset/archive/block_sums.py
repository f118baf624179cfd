"""crc32c sums of a file's 4 MiB blocks: computed just ahead of a reader, and checked."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dataset import checksum
from dataset.errors import UserError

BLOCK_SIZE = 4 << 20
_AHEAD = 8  # blocks in flight: 32 MiB, whatever the size of the file

CountBytes = Callable[[int], object]  # called with the number of bytes just done


class Hasher(Protocol):
    """A hash of the whole file, such as hashlib's: fed with its bytes in order."""

    def update(self, data: bytes, /) -> None: ...


class BlockSummer:
    """Reads a file once from front to back and sums its blocks; `pread` reads behind it.

    What `pread` reads is in the page cache, since its block was summed a moment ago.
    """

    def __init__(
        self,
        fd: int,
        size: int,
        progress: CountBytes,
        hasher: Hasher | None = None,
        threads: int = 2,
    ) -> None:
        if not checksum.HAS_CRC32C:
            raise UserError("block checksums need the crc32c package; run: pip install crc32c")
        self._fd, self._size, self._progress, self._hasher = fd, size, progress, hasher
        self._pool = ThreadPoolExecutor(threads)
        self._pending: deque[Future[tuple[int, bytes]]] = deque()
        self._submitted = 0
        self._sums: list[int] = []

    def __enter__(self) -> BlockSummer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def pread(self, length: int, offset: int) -> bytes:
        """Bytes of the file, once their blocks have been summed."""
        self._advance(min(offset + length, self._size))
        return os.pread(self._fd, length, offset)

    def finish(self) -> npt.NDArray[np.uint32]:
        """The sums of all blocks."""
        self._advance(self._size)
        return np.array(self._sums, np.uint32)

    def _advance(self, position: int) -> None:
        while len(self._sums) * BLOCK_SIZE < position:
            while len(self._pending) < _AHEAD and self._submitted * BLOCK_SIZE < self._size:
                self._pending.append(self._pool.submit(self._sum, self._submitted))
                self._submitted += 1
            value, data = self._pending.popleft().result()
            self._sums.append(value)
            if self._hasher is not None:
                self._hasher.update(data)
            done = len(self._sums) * BLOCK_SIZE
            self._progress(BLOCK_SIZE - max(0, done - self._size))

    def _sum(self, block: int) -> tuple[int, bytes]:
        data = os.pread(self._fd, BLOCK_SIZE, block * BLOCK_SIZE)
        return checksum.compute("crc32c", data), data


def find_bad_ranges(
    fd: int, size: int, expected: npt.NDArray[np.uint32], progress: CountBytes
) -> Iterator[tuple[int, int]]:
    """Byte ranges [start, end) whose blocks differ from their sums, neighbours joined."""
    with BlockSummer(fd, size, progress) as summer:
        differs = np.flatnonzero(summer.finish() != expected)
    for run in np.split(differs, np.flatnonzero(np.diff(differs) > 1) + 1):
        if len(run):
            yield int(run[0]) * BLOCK_SIZE, min(size, int(run[-1] + 1) * BLOCK_SIZE)
