"""The second Ctrl-C ends a rank at once, even while its main thread is inside C++."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from types import TracebackType

from dataset.errors import INTERRUPTED

log = logging.getLogger("trainyard")

# A terminal and an older torchrun both send the same Ctrl-C to a rank.
SAME_PRESS_S = 1.0


class CtrlC:
    """Handles SIGINT in a thread: Python's own handlers run only between two operations."""

    def __init__(self, is_main: bool) -> None:
        self._is_main = is_main
        self._first_s: float | None = None
        self.saves = False  # the first Ctrl-C is taken for a checkpoint (train/ranks/interrupt.py)

    def __enter__(self) -> CtrlC:
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._old_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        signal.set_wakeup_fd(self._old_fd)
        os.close(self._write_fd)  # the thread reads the end of the pipe

    def _listen(self) -> None:
        while data := os.read(self._read_fd, 64):
            if signal.SIGINT in data:
                self._take(time.monotonic())
        os.close(self._read_fd)

    def _take(self, now_s: float) -> None:
        if self._first_s is None:
            self._first_s = now_s
            if self.saves and self._is_main:
                log.info("Ctrl-C: saves a checkpoint and stops; a second one ends it without")
        elif now_s - self._first_s >= SAME_PRESS_S:
            self._end()

    def _end(self) -> None:
        if self._is_main:
            print("error: interrupted twice; ended at once", file=sys.stderr, flush=True)
        os._exit(INTERRUPTED)
