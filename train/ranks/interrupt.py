"""Signals: the ranks agree on the step at which they stop; a second Ctrl-C ends a rank at once."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from dataset.errors import INTERRUPTED
from train.ranks.comm import Comm

log = logging.getLogger("trainyard")

FINAL = (signal.SIGTERM, signal.SIGINT)  # never followed by a requeue
CANCELLED = {number.name for number in FINAL}  # the same as reasons of a stop
GRACE_S = 20.0  # SLURM's KillWait is 30 s; the checkpoint needs the rest
# Before a time limit: a tenth of the job, between these bounds, for the step and the checkpoint.
MIN_MARGIN_S, MAX_MARGIN_S = 10.0, 60.0
# A terminal and an older torchrun both send the same Ctrl-C to a rank.
SAME_PRESS_S = 1.0


class Vote(IntEnum):
    """What a rank wants; all ranks follow the highest vote."""

    GO_ON = 0
    SAVE = 1  # the checkpoint interval is over: save and continue
    SAVE_AND_EXIT = 2  # the same on the grid, where HTCondor takes checkpoints at an exit
    REQUEUE = 3
    EXIT = 4  # SIGTERM or Ctrl-C: a cancelled job must stay dead
    REQUEUE_NOW = 5  # the running step is too long: abandon it
    EXIT_NOW = 6

    @property
    def stops(self) -> bool:
        return self > Vote.SAVE

    @property
    def is_urgent(self) -> bool:
        """Whether a running validation is left to the next start."""
        return self >= Vote.REQUEUE

    @property
    def abandons_step(self) -> bool:
        return self >= Vote.REQUEUE_NOW

    @property
    def requeues(self) -> bool:
        return self in (Vote.REQUEUE, Vote.REQUEUE_NOW)


# Starts to send this rank's vote; the returned function waits for the highest vote of all ranks.
Cast = Callable[[Vote], Callable[[], Vote]]


class Interrupt:
    """A rank's stop flag, and the agreement of all ranks, without waiting for the device."""

    def __init__(self, comm: Comm, deadline: float | None) -> None:
        self._comm = comm
        self._deadline = deadline
        left_s = 0.0 if deadline is None else deadline - time.time()
        self._margin_s = min(MAX_MARGIN_S, max(MIN_MARGIN_S, 0.1 * left_s))
        self._signal: signal.Signals | None = None
        self._signal_s = 0.0
        self._was_late = False
        self._read: Callable[[], Vote] | None = None  # the vote under way
        self.wanted = Vote.GO_ON  # SAVE or SAVE_AND_EXIT: set by rank 0 when it is time
        self._old_handlers: dict[int, Any] = {}

    def install(self) -> None:
        """Takes over the signals of schedulers; submitit's handlers act on rank 0 alone."""
        for number in (*FINAL, signal.SIGUSR1, signal.SIGUSR2):
            if number == signal.SIGINT and signal.getsignal(number) == signal.SIG_IGN:
                continue  # a shell started it in the background, or a study keeps Ctrl-C to itself
            self._old_handlers[number] = signal.signal(number, self._on_signal)
        # A warning signal held back during start-up (train/__main__.py) is delivered now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1, signal.SIGUSR2})

    def uninstall(self) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._old_handlers = {}

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._signal not in FINAL:  # they outrank the warnings that may come before them
            self._signal = signal.Signals(number)
        self._signal_s = self._signal_s or time.monotonic()

    @property
    def reason(self) -> str:
        """Why this rank wants to stop, for the record."""
        if self._signal is not None:
            return self._signal.name
        return "time limit" if self._was_late else ""

    def vote(self, step_left_s: float, stop_cost_s: float) -> Vote:
        """This rank's vote, given how long the step and a checkpoint will still take.

        A wish for a checkpoint is voted for once.
        """
        vote = self._vote_to_stop(step_left_s, stop_cost_s)
        if vote is Vote.GO_ON:
            vote, self.wanted = self.wanted, Vote.GO_ON
        return vote

    def vote_alone(self, stop_cost_s: float) -> Vote:
        """This rank's vote to stop while it waits for data, when the step may never end."""
        return self._vote_to_stop(math.inf, stop_cost_s)

    def _vote_to_stop(self, step_left_s: float, stop_cost_s: float) -> Vote:
        if self._signal in FINAL:
            used_s = time.monotonic() - self._signal_s
            return Vote.EXIT_NOW if used_s + step_left_s > GRACE_S else Vote.EXIT
        if self._signal is not None:
            used_s = time.monotonic() - self._signal_s
            return Vote.REQUEUE_NOW if used_s + step_left_s > 3 * GRACE_S else Vote.REQUEUE
        if self._is_late(stop_cost_s):
            self._was_late = True
            too_long = self._is_late(step_left_s + stop_cost_s - self._margin_s)
            return Vote.REQUEUE_NOW if too_long else Vote.REQUEUE
        return Vote.GO_ON

    def agree(self, step_left_s: float, stop_cost_s: float, cast: Cast | None = None) -> Vote:
        """The result of the votes of the previous call: the same on every rank, no device sync.

        Votes travel by `cast`, with an exchange that happens anyway, or else over gloo.
        """
        mine = self.vote(step_left_s, stop_cost_s)
        if self._comm.control is None:
            return mine
        agreed = self.settle()
        if not agreed.stops:
            self._read = (cast or self._cast_over_gloo)(mine)
        return agreed

    def settle(self) -> Vote:
        """Waits for the running vote, so that nothing is in flight when the group is closed."""
        read, self._read = self._read, None
        return read() if read else Vote.GO_ON

    def _cast_over_gloo(self, mine: Vote) -> Callable[[], Vote]:
        votes = torch.tensor([int(mine)], dtype=torch.int32)
        control = self._comm.control
        work = dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=control, async_op=True)

        def read() -> Vote:
            work.wait()
            return Vote(int(votes))

        return read

    def _is_late(self, extra_s: float) -> bool:
        return self._deadline is not None and (
            time.time() + self._margin_s + extra_s > self._deadline
        )


class CtrlC:
    """Handles SIGINT in a thread: Python's own handlers run only between two operations.

    So the second Ctrl-C ends a rank even while its main thread is inside C++.
    """

    def __init__(self, is_main: bool) -> None:
        self._is_main = is_main
        self._first_s: float | None = None
        self.saves = False  # the first Ctrl-C is taken for a checkpoint (Interrupt)

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
