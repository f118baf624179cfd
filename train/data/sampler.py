"""Which images make up global step k: pure functions of (seed, epoch, k), the same on any ranks.

The numbers come from splitmix64, written out here, and not from numpy's generators: those may
change between releases, and a run may be resumed under another one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dataset.errors import UserError
from dataset.words import count

U64 = npt.NDArray[np.uint64]
Int64s = npt.NDArray[np.int64]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 0xFFFFFFFFFFFFFFFF
MAX_VAL_BATCH = 256


def mix(value: U64) -> U64:
    """splitmix64's finaliser: well-spread 64-bit values from counters."""
    with np.errstate(over="ignore"):
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))


def derive_key(*parts: int) -> int:
    """One 64-bit key from whole numbers; the order of the parts matters."""
    key = 0
    for part in parts:
        word = np.array([(key ^ (part & _MASK)) + _GOLDEN & _MASK], dtype=np.uint64)
        key = int(mix(word)[0])
    return key


def make_words(counters: Int64s, *parts: int) -> U64:
    """A well-spread word for each counter, with a key from whole numbers."""
    with np.errstate(over="ignore"):
        return mix(counters.astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(derive_key(*parts)))


def epoch_order(seed: int, epoch: int, num_samples: int) -> Int64s:
    """The permutation of an epoch; its tail beyond whole batches differs every epoch."""
    keys = make_words(np.arange(num_samples), seed, epoch)
    return np.argsort(keys, kind="stable").astype(np.int64)


def sample_uniforms(seed: int, epoch: int, indices: Int64s, count: int) -> npt.NDArray[np.float64]:
    """count numbers in [0, 1) for each sample, which determine its crop and flip."""
    base = np.uint64(derive_key(seed, epoch, 0x5EED))
    with np.errstate(over="ignore"):
        rows = mix(indices.astype(np.uint64) * np.uint64(_GOLDEN) + base)
        columns = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        words = mix(rows[:, None] + columns[None, :])
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True)
class BatchPlan:
    """How a global batch is cut into microbatches, of which each rank gets a contiguous run.

    The cut does not depend on the number of ranks, so batch norm always sees the same groups.
    """

    num_samples: int
    batch_size: int
    microbatch: int
    rank: int
    world_size: int

    @property
    def steps_per_epoch(self) -> int:
        return self.num_samples // self.batch_size

    @property
    def num_dropped(self) -> int:
        """Samples that no step of an epoch uses; they differ from epoch to epoch."""
        return self.num_samples - self.steps_per_epoch * self.batch_size

    @property
    def microbatches_per_rank(self) -> int:
        return self.batch_size // (self.microbatch * self.world_size)

    @property
    def my_microbatches(self) -> range:
        """The numbers of this rank's microbatches within the global step."""
        first = self.rank * self.microbatches_per_rank
        return range(first, first + self.microbatches_per_rank)

    def select(self, order: Int64s, step_in_epoch: int, microbatch: int) -> Int64s:
        """The samples of one microbatch of one step."""
        start = step_in_epoch * self.batch_size + microbatch * self.microbatch
        return order[start : start + self.microbatch]


def check_batch(num_samples: int, batch_size: int, world_size: int) -> None:
    """Raises if no step of an epoch can have such a batch, split evenly over the ranks."""
    if batch_size % world_size:
        raise UserError(
            f"--batch-size {batch_size} is the global batch and cannot be split evenly over "
            f"{world_size} ranks; use a multiple of {world_size}"
        )
    if num_samples < batch_size:
        raise UserError(
            f"{num_samples} training images are fewer than one batch of {batch_size} on "
            f"{count(world_size, 'rank')}; use a smaller --batch-size or fewer ranks"
        )


@dataclass(frozen=True)
class ValidationShare:
    """This rank's part of the validation set; parts may differ by one batch or a few images."""

    num_images: int  # of the whole set
    num_batches: int
    num_common: int  # batches that every rank has at least


def share_validation(plan: BatchPlan, num_images: int) -> ValidationShare:
    """How a validation set is dealt out over the ranks of a plan."""
    batch, world = min(plan.microbatch, MAX_VAL_BATCH), plan.world_size
    mine, fewest = (split_validation(num_images, batch, r, world) for r in (plan.rank, world - 1))
    return ValidationShare(num_images, len(mine), len(fewest))


def split_validation(num_samples: int, batch: int, rank: int, world_size: int) -> list[Int64s]:
    """This rank's validation batches: over the ranks, every sample exactly once."""
    mine = np.arange(rank, num_samples, world_size, dtype=np.int64)
    return [mine[start : start + batch] for start in range(0, len(mine), batch)]
