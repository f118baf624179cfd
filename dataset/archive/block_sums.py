"""Sums of a file's blocks, of 1 MiB today: computed just ahead of a reader, and checked."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dataset import checksum
from dataset.archive.unit_sums import PrefixSums
from dataset.errors import UserError

# zlib has crc32 (2 GB/s), so every slot of a grid can check it; a block is a chunk of the fetch.
KIND = "crc32"
BLOCK_SIZES = {"crc32": 1 << 20, "crc32c": 4 << 20}  # the second in indexes of earlier versions
BLOCK_SIZE = BLOCK_SIZES[KIND]
_AHEAD_BYTES = 32 << 20  # in flight, whatever the size of the file

CountBytes = Callable[[int], object]  # called with the number of bytes just done


@dataclass(frozen=True)
class BlockSums:
    """The sums of all blocks of a file."""

    kind: str
    values: npt.NDArray[np.uint32]

    @property
    def block_size(self) -> int:
        return BLOCK_SIZES[self.kind]

    @property
    def can_check(self) -> bool:
        """Whether they can be compared with the file here: crc32c needs its package."""
        return checksum.can_compute(self.kind)


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
        kind: str = KIND,
        prefix: PrefixSums | None = None,
    ) -> None:
        if not checksum.can_compute(kind):
            raise UserError(
                f"the index has {kind} checksums, which need a package; run: pip install {kind}"
            )
        self._kind, self._block_size = kind, BLOCK_SIZES[kind]
        self._ahead = _AHEAD_BYTES // self._block_size
        self._fd, self._size, self._progress, self._hasher = fd, size, progress, hasher
        self._pool = ThreadPoolExecutor(threads)
        self._pending: deque[Future[tuple[int, bytes]]] = deque()
        self._submitted = 0
        self._sums: list[int] = []
        self._prefix, self._last = prefix, b""  # the block that was summed last

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
        if self._prefix is not None:
            self._advance(min(offset + 1, self._size))
            self._prefix.mark(self._last, self._last_begin, offset)
        self._advance(min(offset + length, self._size))
        return os.pread(self._fd, length, offset)

    def finish(self) -> BlockSums:
        """The sums of all blocks."""
        self._advance(self._size)
        if self._prefix is not None:
            self._prefix.take(self._last, self._last_begin)
        return BlockSums(self._kind, np.array(self._sums, np.uint32))

    @property
    def _last_begin(self) -> int:
        return max(0, len(self._sums) - 1) * self._block_size

    def _advance(self, position: int) -> None:
        block_size = self._block_size
        while len(self._sums) * block_size < position:
            while len(self._pending) < self._ahead and self._submitted * block_size < self._size:
                self._pending.append(self._pool.submit(self._sum, self._submitted))
                self._submitted += 1
            value, data = self._pending.popleft().result()
            if self._prefix is not None:
                self._prefix.take(self._last, self._last_begin)
            self._sums.append(value)
            self._last = data
            if self._hasher is not None:
                self._hasher.update(data)
            done = len(self._sums) * block_size
            self._progress(block_size - max(0, done - self._size))

    def _sum(self, block: int) -> tuple[int, bytes]:
        data = os.pread(self._fd, self._block_size, block * self._block_size)
        return checksum.compute(self._kind, data), data


def find_bad_ranges(
    fd: int, size: int, expected: BlockSums, progress: CountBytes
) -> Iterator[tuple[int, int]]:
    """Byte ranges [start, end) whose blocks differ from their sums, neighbours joined."""
    block_size = expected.block_size
    with BlockSummer(fd, size, progress, kind=expected.kind) as summer:
        differs = np.flatnonzero(summer.finish().values != expected.values)
    for run in np.split(differs, np.flatnonzero(np.diff(differs) > 1) + 1):
        if len(run):
            yield int(run[0]) * block_size, min(size, int(run[-1] + 1) * block_size)
