"""Batch-norm statistics that do not depend on how a global step is split over ranks.

Plain DDP keeps the running statistics of rank 0 alone, and gradient accumulation moves them once a
microbatch. Here they move once an optimiser step, by the mean over all its microbatches. After
every step all ranks hold the same values, so that a checkpoint or an evaluation at any moment
needs no exchange. The one small all-reduce is launched before the backward pass, which hides it. It
also carries the ranks' stop votes, so that they need no exchange of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from train.network.fine_tune import keeps_statistics
from train.ranks.interrupt import Vote


class StepStatistics:
    """The running statistics of all batch-norm layers over one optimiser step.

    A layer's update is linear in the statistics of its batch: started from the same base, the
    mean of the updated buffers is the update by the mean statistics.
    """

    def __init__(self, model: nn.Module, microbatches_per_rank: int, world_size: int) -> None:
        layers = [m for m in model.modules() if isinstance(m, _BatchNorm)]
        layers = [m for m in layers if m.track_running_stats and not keeps_statistics(m)]
        pairs = [(m.running_mean, m.running_var) for m in layers]
        self._running = [t for pair in pairs for t in pair if t is not None]
        self._counters = [c for c in map(_take_counter, layers) if c is not None]
        self._parts = microbatches_per_rank
        self._world_size = world_size
        # Without accumulation nothing is summed, and no part of a step is ever undone.
        copied = self._running if self._parts > 1 else []
        self._base = [torch.empty_like(t) for t in copied]
        self._sum = [torch.empty_like(t) for t in copied]
        self._num_summed = 0
        has_exchange = bool(self._running) and world_size > 1
        self._exchange = _Exchange(self._running) if has_exchange else None

    @property
    def carries_votes(self) -> bool:
        """Whether `cast` can be used: there is an exchange for every vote of a step."""
        return self._exchange is not None and self._parts == 1

    def cast(self, vote: Vote) -> Callable[[], Vote]:
        """Sends a vote with this step; returns a function that gives the highest vote."""
        assert self._exchange is not None
        return self._exchange.cast(vote)

    @torch.no_grad()
    def begin(self) -> None:
        """Remembers the statistics before the step, where parts of it are undone."""
        if self._base:
            torch._foreach_copy_(self._base, self._running)
            self._num_summed = 0

    @torch.no_grad()
    def after_forward(self, is_last: bool) -> None:
        """Adds a microbatch's update; after the last one it starts the exchange with the ranks."""
        if self._sum:
            add = torch._foreach_add_ if self._num_summed else torch._foreach_copy_
            add(self._sum, self._running)
            self._num_summed += 1
        if is_last and self._exchange is not None:
            self._exchange.start(self._sum or self._running)

    @torch.no_grad()
    def after_backward(self, is_last: bool) -> None:
        """Restores the base for the next microbatch; not before backward, which checks it."""
        if self._base and not is_last:
            torch._foreach_copy_(self._running, self._base)

    @torch.no_grad()
    def finish(self) -> None:
        """The statistics after the step, the same on every rank."""
        if not self._running:
            return
        if self._exchange is not None:
            means = self._exchange.finish(self._parts * self._world_size)
            torch._foreach_copy_(self._running, means)
        elif self._sum:
            torch._foreach_div_(self._sum, float(self._parts))
            torch._foreach_copy_(self._running, self._sum)
        torch._foreach_add_(self._counters, 1)

    @torch.no_grad()
    def abandon(self) -> None:
        """Restores the statistics before the step; without accumulation nothing has changed yet."""
        if self._base:
            torch._foreach_copy_(self._running, self._base)


def _take_counter(layer: _BatchNorm) -> torch.Tensor | None:
    """Hides a layer's batch counter from its forward pass: we count once per step.

    A plain attribute hides the buffer of the same name, which stays in the state dict. That saves
    one kernel per layer, and an abandoned step need not restore the counter.
    """
    assert layer.momentum is not None, "the mean over all batches needs the counter in forward"
    counter = layer.num_batches_tracked
    layer.__dict__["num_batches_tracked"] = None
    return counter


class _Exchange:
    """The all-reduce of a step: its statistics, then the number of ranks for each vote."""

    def __init__(self, running: list[torch.Tensor]) -> None:
        like = running[0]
        self._ballots = torch.eye(len(Vote), dtype=like.dtype, device=like.device).unbind()
        self._mine = Vote.GO_ON
        sizes = [*(t.numel() for t in running), len(Vote)]
        self._flat = torch.zeros(sum(sizes), dtype=like.dtype).to(like.device)
        *means, counts = torch.split(self._flat, sizes)
        self._means, self._counts = means, counts
        self._values = self._flat[: -len(Vote)]
        self._work: Any = None
        self._copied: Any = None
        self._stream: Any = None
        if like.is_cuda:
            self._stream = torch.cuda.Stream(like.device)  # type: ignore[no-untyped-call]
            self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._host_counts = torch.zeros(len(Vote), dtype=like.dtype, pin_memory=True)
        else:
            self._host_counts = counts

    def cast(self, vote: Vote) -> Callable[[], Vote]:
        self._mine = vote
        return self._read

    def start(self, mine: list[torch.Tensor]) -> None:
        """Launches the all-reduce; the next vote is cast only when this one has been read."""
        torch.cat([*(t.flatten() for t in mine), self._ballots[self._mine]], out=self._flat)
        self._mine = Vote.GO_ON
        self._work = dist.all_reduce(self._flat, async_op=True)
        if self._stream is not None:
            # Runs beside the backward pass: reading the votes in the next step waits at most for
            # the end of this forward pass, while the device still has all of backward to do.
            with torch.cuda.stream(self._stream):
                self._work.wait()
                self._host_counts.copy_(self._counts, non_blocking=True)
                self._copied.record()

    def finish(self, num_parts: int) -> list[torch.Tensor]:
        """The mean statistics over all parts of all ranks."""
        self._work.wait()
        self._values.div_(num_parts)
        return self._means

    def _read(self) -> Vote:
        """The highest vote; sums of single ranks are exact in any format."""
        if self._copied is not None:
            self._copied.synchronize()
        counts = self._host_counts.tolist()
        return max((vote for vote in Vote if counts[vote] > 0), default=Vote.GO_ON)
