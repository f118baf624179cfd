"""The loader's readers: how many threads read at a time, and what each is reading (no torch).

A read that waits for a shared disk needs more threads than cores; a read from memory does not, and
threads that only wait for each other cost a quarter of the speed (benchmarks/loader_latency.py).
"""

from __future__ import annotations

import itertools
import mmap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from train.data.sources import Source

SMOOTHING = 0.1  # weight of the newest turn
MAX_ROWS = 1024  # more readers share rows: the name may then be of another slow read
SPARE = 1.25  # reads scatter: some more threads than the mean would need


class Pace:
    """Lets threads take turns: all at first, then as many as the measured times need."""

    def __init__(self, num_decoders: int, num_threads: int) -> None:
        self.limit = self._most = max(num_decoders, num_threads)
        self._num_decoders = num_decoders
        self._num_active = 0
        self._changed = threading.Condition()
        self._decoding = threading.Semaphore(num_decoders)
        self._spent = threading.local()
        self._read_s = self._decode_s = 0.0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """This thread's turn, in which it reads and decodes some images."""
        with self._changed:
            while self._num_active >= self.limit:
                self._changed.wait()
            self._num_active += 1
        self._spent.read_s = self._spent.decode_s = 0.0
        try:
            yield
        finally:
            with self._changed:
                self._num_active -= 1
                self._learn(self._spent.read_s, self._spent.decode_s)
                self._changed.notify(max(1, self.limit - self._num_active))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Counts the time inside as reading."""
        begin_s = time.perf_counter()
        yield
        self._spent.read_s += time.perf_counter() - begin_s

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Counts the time inside as decoding, and admits only as many threads as may decode."""
        with self._decoding:
            begin_s = time.perf_counter()
            yield
            self._spent.decode_s += time.perf_counter() - begin_s

    def _learn(self, read_s: float, decode_s: float) -> None:
        if decode_s <= 0:  # nothing was decoded: a turn that ended with an error
            return
        weight = SMOOTHING if self._decode_s else 1.0
        self._read_s += weight * (read_s - self._read_s)
        self._decode_s += weight * (decode_s - self._decode_s)
        self.limit = choose_limit(
            self._num_decoders, self._most, self._read_s / max(self._decode_s, 1e-9)
        )


def choose_limit(num_decoders: int, most: int, reads_per_decode: float) -> int:
    """Threads that keep this many decoders busy, given the time of a read in decodings."""
    wanted = round(num_decoders * (1 + reads_per_decode) * SPARE)
    return max(num_decoders, min(most, wanted))


class SlowRead(NamedTuple):
    """A read that is under way."""

    seconds: float
    is_val: bool
    sample: int


class Reads:
    """A row for each reader, in memory that forked workers share with the waiting process."""

    def __init__(self) -> None:
        memory = mmap.mmap(-1, MAX_ROWS * 3 * 8)
        # since when (0: it reads nothing), is_val, index
        self._rows = np.frombuffer(memory, np.float64).reshape(-1, 3)
        self._count = itertools.count()
        self._mine = threading.local()

    def take_row(self, number: int) -> None:
        """Gives this thread a row: a worker process cannot count the others."""
        self._mine.row = self._rows[number % MAX_ROWS]

    def read(self, source: Source, is_val: bool, index: int) -> bytes:
        """The bytes of an image; the read is listed while it runs."""
        if not hasattr(self._mine, "row"):
            self.take_row(next(self._count))
        row = self._mine.row
        row[1:] = is_val, index
        row[0] = time.monotonic()  # the same clock in all processes of a machine
        try:
            return source.read(index)
        finally:
            row[0] = 0.0

    def slowest(self) -> SlowRead | None:
        """The oldest read that is running."""
        rows = self._rows.copy()  # before a look at it: reads end at any moment
        rows = rows[rows[:, 0] > 0]
        if not len(rows):
            return None
        since_s, is_val, sample = rows[rows[:, 0].argmin()].tolist()
        return SlowRead(time.monotonic() - since_s, bool(is_val), int(sample))
