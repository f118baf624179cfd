"""Waiting for batches without getting stuck: a read that never returns is named, and abandoned.

The main thread never reads an image and never waits inside the loader. Another thread takes the
batches from the loader. The main thread waits for that thread in short intervals, and checks
between them whether the run is to stop. So whatever hangs in the loader, a dead network disk or a
worker process, the run can be saved and ended. The loader must follow one rule: every read goes
through train/data/readers.py, so that it can be named.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import torch

from train.data.batches import Batch, Images
from train.ranks.interrupt import Vote

log = logging.getLogger("trainyard")

POLL_S = 0.2
WARN_S = 10.0  # the first warning about a read; then each time that it has taken twice as long
STOP_S = 5.0  # of waiting after a stop was asked for: SLURM kills after 30 s

Stop = Callable[[], Vote]


# The threads of loops that go on or have just been left, and how each is told to end.
_threads: weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue[bool]]
_threads = weakref.WeakKeyDictionary()


@atexit.register
def _end_threads() -> None:
    """Lets the threads end before the interpreter does.

    One that is inside torch when Python takes its threads down would abort the whole process.
    """
    deadline_s = time.monotonic() + STOP_S
    for thread, asked in list(_threads.items()):
        asked.put(False)
        thread.join(max(0.0, deadline_s - time.monotonic()))


class Stranded(Exception):
    """The run is to stop, but no batch comes: the current step cannot be finished."""

    def __init__(self, vote: Vote, what: str) -> None:
        super().__init__(f"no batch came: {what}")
        self.vote, self.what = vote, what


class PatientBatches(Iterator[Batch]):
    """The batches of a loader, waited for in short intervals."""

    def __init__(
        self, batches: Iterator[Batch], images: Images, stop: Stop, device: torch.device
    ) -> None:
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._given: queue.SimpleQueue[Batch | BaseException] = queue.SimpleQueue()
        self._images, self._stop = images, stop
        self._warn_at_s = WARN_S
        args = (batches, self._asked, self._given, device)
        # A daemon: the interpreter must not wait for a thread that hangs.
        thread = threading.Thread(target=_hand_out, args=args, name="batches", daemon=True)
        _threads[thread] = self._asked
        thread.start()

    def __next__(self) -> Batch:
        self._asked.put(True)
        stop_seen_s: float | None = None
        while True:
            try:
                given = self._given.get(timeout=POLL_S)
                break
            except queue.Empty:
                what = self._look()
            vote, now_s = self._stop(), time.monotonic()
            stop_seen_s = (stop_seen_s or now_s) if vote.is_urgent else None
            if stop_seen_s is not None and now_s - stop_seen_s >= STOP_S:
                raise Stranded(vote, what)
        if isinstance(given, BaseException):
            raise given
        return given

    def __del__(self) -> None:
        self._asked.put(False)

    def _look(self) -> str:
        """What is being waited for; logs a read that takes very long."""
        read = self._images.reads.slowest()
        if read is None:
            return "the loader has not finished it"
        what = f"{self._images.where(read.is_val, read.sample)} has been read for"
        if read.seconds < WARN_S:
            self._warn_at_s = WARN_S
        elif read.seconds >= self._warn_at_s:
            self._warn_at_s = 2 * read.seconds
            why = self._images.explain_wait(read.is_val, read.sample)
            log.warning(
                "%s %.0f s and has not arrived; training waits. %s", what, read.seconds, why
            )
        return f"{what} {read.seconds:.0f} s"


def _hand_out(
    batches: Iterator[Batch],
    asked: queue.SimpleQueue[bool],
    given: queue.SimpleQueue[Batch | BaseException],
    device: torch.device,
) -> None:
    """Answers each request with a batch or an error; ends when its requester is gone."""
    if device.type == "cuda":  # a thread has its own current device, which owns pinned memory
        torch.cuda.set_device(device)
    while asked.get():
        try:
            given.put(next(batches))
        except BaseException as error:  # StopIteration too: raised again in the waiting thread
            given.put(error)
