"""The batch of each size of a study, and a batch-norm group that all sizes can share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dataset.errors import UserError


def batch_sizes(gpus: Sequence[int], mode: str, first_batch: int) -> dict[int, int]:
    """The global batch of each size, given that of the smallest one."""
    smallest = min(gpus)
    batches = {}
    for num_gpus in sorted(gpus):
        scale = num_gpus / smallest if mode == "weak" else 1
        batch_size = round(first_batch * scale)
        if batch_size % num_gpus or batch_size != first_batch * scale:
            raise UserError(
                f"a batch of {first_batch} cannot be split evenly over {num_gpus} GPUs ({mode} "
                f"scaling from {smallest}); give -b a multiple of {smallest * num_gpus} after --"
            )
        batches[num_gpus] = batch_size
    return batches


def microbatch_flags(batches: Mapping[int, int], agreed: int | None) -> list[str]:
    """Flags that give batch norm groups of the same size in all rows.

    `agreed` is the smallest microbatch that a row found to fit. Until there is one, each row looks
    for what fits, starting with the largest microbatch that all rows could use.
    """
    if agreed is not None:
        return ["--microbatch", str(agreed)]
    per_gpu = [batch_size // num_gpus for num_gpus, batch_size in batches.items()]
    shared = math.gcd(*per_gpu)
    return ["--largest-microbatch", str(shared)] if max(per_gpu) > shared else []
