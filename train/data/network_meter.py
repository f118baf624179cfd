"""What the network costs a rank: reads that found their bytes, and the time of those that waited.

The counts lie in a small file that the rank's loader processes map (no torch).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

_WORDS = ("hits", "misses", "num_waiting", "since_ns", "waited_ns")
_WORD = {name: number for number, name in enumerate(_WORDS)}


class NetworkMeter:
    """The counts of one rank. Threads and processes take turns: a word has one writer at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open()

    def __getstate__(self) -> Path:
        return self.path

    def __setstate__(self, path: Path) -> None:
        self.path = path
        self._open()

    def _open(self) -> None:
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._fd, len(_WORDS) * 8)
        self._words = np.frombuffer(mmap.mmap(self._fd, len(_WORDS) * 8), np.int64)
        self._lock, self._pid = threading.Lock(), os.getpid()

    def __del__(self) -> None:
        os.close(self._fd)

    def count_hit(self) -> None:
        """A read found its bytes."""
        with self._turn():
            self._words[_WORD["hits"]] += 1

    @contextmanager
    def waiting(self, tell: Callable[[int], None]) -> Iterator[None]:
        """A read waits for its bytes; tell is called in turn, with 1 and then with -1."""
        words = self._words
        with self._turn():
            tell(1)
            words[_WORD["misses"]] += 1
            if not words[_WORD["num_waiting"]]:
                words[_WORD["since_ns"]] = time.monotonic_ns()
            words[_WORD["num_waiting"]] += 1
        try:
            yield
        finally:
            with self._turn():
                tell(-1)
                words[_WORD["num_waiting"]] -= 1
                if not words[_WORD["num_waiting"]]:
                    waited_ns = time.monotonic_ns() - int(words[_WORD["since_ns"]])
                    words[_WORD["waited_ns"]] += waited_ns

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Keeps other threads out by a lock, and other processes by that of the file."""
        if self._pid != os.getpid():  # forked: the lock may have been held by another thread
            self._lock, self._pid = threading.Lock(), os.getpid()
        with self._lock:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX)
            except OSError:  # a file system without locks: processes may lose a count
                yield
                return
            try:
                yield
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)

    @property
    def hits(self) -> int:
        return int(self._words[_WORD["hits"]])

    @property
    def misses(self) -> int:
        return int(self._words[_WORD["misses"]])

    @property
    def waited_s(self) -> float:
        """How long at least one read waited, up to now."""
        with self._turn():
            waited_ns = int(self._words[_WORD["waited_ns"]])
            if self._words[_WORD["num_waiting"]]:
                waited_ns += time.monotonic_ns() - int(self._words[_WORD["since_ns"]])
        return waited_ns / 1e9
