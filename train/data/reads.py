"""What the loader's threads and worker processes are reading right now (no torch)."""

from __future__ import annotations

import itertools
import mmap
import threading
import time
from typing import NamedTuple

import numpy as np

from train.data.sources import Source

MAX_READERS = 1024  # more share rows: the name may then be of another slow read


class SlowRead(NamedTuple):
    """A read that is under way."""

    seconds: float
    is_val: bool
    sample: int


class Reads:
    """A row for each reader, in memory that forked workers share with the waiting process."""

    def __init__(self) -> None:
        memory = mmap.mmap(-1, MAX_READERS * 3 * 8)
        # since when (0: it reads nothing), is_val, index
        self._rows = np.frombuffer(memory, np.float64).reshape(-1, 3)
        self._count = itertools.count()
        self._mine = threading.local()

    def take_row(self, number: int) -> None:
        """Gives this thread a row: a worker process cannot count the others."""
        self._mine.row = self._rows[number % MAX_READERS]

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
        rows = self._rows[self._rows[:, 0] > 0].copy()
        if not len(rows):
            return None
        since_s, is_val, sample = rows[rows[:, 0].argmin()].tolist()
        return SlowRead(time.monotonic() - since_s, bool(is_val), int(sample))
