"""How many loader threads work at a time: enough that no decoder waits for a read.

A read that waits for a shared disk needs more threads than cores; a read from memory does not, and
threads that only wait for each other cost a quarter of the speed (benchmarks/loader_latency.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

SMOOTHING = 0.1  # weight of the newest turn
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
