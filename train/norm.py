"""Batch-norm statistics that do not depend on how a global step is cut over ranks.

Plain DDP keeps the running statistics of rank 0 alone, and gradient accumulation moves them once a
microbatch. Here they move once an optimiser step, by the mean over all its microbatches. After
every step all ranks hold the same values, so that a checkpoint or an evaluation at any moment
needs no exchange; the one small all-reduce is launched before the backward pass and hides in it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class StepStatistics:
    """The running statistics of all batch-norm layers over one optimiser step.

    A layer's update is linear in the statistics of its batch: started from the same base, the
    mean of the updated buffers is the update by the mean statistics.
    """

    def __init__(self, model: nn.Module, microbatches_per_rank: int, world_size: int) -> None:
        layers = [m for m in model.modules() if isinstance(m, _BatchNorm)]
        layers = [m for m in layers if m.track_running_stats]
        pairs = [(m.running_mean, m.running_var) for m in layers]
        self._running = [t for pair in pairs for t in pair if t is not None]
        counters = [m.num_batches_tracked for m in layers]
        self._counters = [c for c in counters if c is not None]
        self._parts = microbatches_per_rank
        self._world_size = world_size
        self._flat = torch.cat([t.flatten() for t in self._running]) if self._running else None
        self._base: list[torch.Tensor] = []
        self._base_counters: list[torch.Tensor] = []
        self._sum: list[torch.Tensor] = []
        self._work: Any = None

    @torch.no_grad()
    def begin(self) -> None:
        """Remembers the statistics before the step."""
        if self._running and (self._parts > 1 or self._world_size > 1):
            self._base = [t.clone() for t in self._running]
            self._base_counters = [t.clone() for t in self._counters]
            self._sum = []

    @torch.no_grad()
    def after_forward(self, is_last: bool) -> None:
        """Takes up a microbatch's update; after the last one the exchange with the ranks starts."""
        if self._parts > 1 and self._running:
            if self._sum:
                torch._foreach_add_(self._sum, self._running)
            else:
                self._sum = [t.clone() for t in self._running]
        if is_last and self._flat is not None and self._world_size > 1:
            mine = self._sum if self._parts > 1 else self._running
            torch.cat([t.flatten() for t in mine], out=self._flat)
            self._work = dist.all_reduce(self._flat, async_op=True)

    @torch.no_grad()
    def after_backward(self, is_last: bool) -> None:
        """Back to the base for the next microbatch: not earlier, since backward checks it."""
        if self._parts > 1 and self._running and not is_last:
            torch._foreach_copy_(self._running, self._base)

    @torch.no_grad()
    def finish(self) -> None:
        """The statistics after the step, the same on every rank."""
        if not self._running:
            return
        parts = self._parts * self._world_size
        if self._world_size > 1:
            assert self._flat is not None
            self._work.wait()
            means = torch.split(self._flat.div_(parts), [t.numel() for t in self._running])
            torch._foreach_copy_(self._running, list(means))
        elif self._parts > 1:
            torch._foreach_div_(self._sum, float(parts))
            torch._foreach_copy_(self._running, self._sum)
        if self._parts > 1:
            torch._foreach_copy_(self._counters, self._base_counters)
            torch._foreach_add_(self._counters, 1)

    @torch.no_grad()
    def abandon(self) -> None:
        """Back to the statistics before the step."""
        if self._base:
            torch._foreach_copy_(self._running, self._base)
            torch._foreach_copy_(self._counters, self._base_counters)
