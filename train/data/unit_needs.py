"""When a run uses each unit of its tar, and how much disk that takes at least (no torch)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dataset.archive.units import EMPTY, Units
from dataset.stream.spec import NEVER
from dataset.stream.unit_plan import EpochPlan
from train.data.sample_order import SampleOrder

UNITS_A_CONNECTION = 2  # one on its way, one that waits to be used


@dataclass(frozen=True)
class RunSteps:
    """The steps of a run that goes on at `step` and ends before `total`, and their samples."""

    order: SampleOrder
    seed: int
    batch_size: int
    step: int
    total: int
    slots: npt.NDArray[np.bool_] | None = None  # of a batch, that this node uses; None: all


@dataclass(frozen=True)
class UnitNeeds:
    """The uses of the units by a run."""

    run: RunSteps
    units: Units

    @property
    def per_epoch(self) -> int:
        return len(self.units.unit) // self.run.batch_size

    @property
    def first_epoch(self) -> int:
        return self.run.step // self.per_epoch

    @property
    def num_epochs(self) -> int:
        """How many epochs are left, the one under way included."""
        return -(-self.run.total // self.per_epoch) - self.first_epoch

    def plan(self, number: int) -> EpochPlan:
        """The uses in the epoch that comes as number 0, 1, 2 ... from now on."""
        epoch, per_epoch, run = self.first_epoch + number, self.per_epoch, self.run
        samples = run.order.permute(run.seed, epoch, len(self.units.unit))
        steps = np.arange(per_epoch * run.batch_size) // run.batch_size + epoch * per_epoch
        is_left = (steps >= run.step) & (steps < run.total)
        if run.slots is not None:
            is_left &= np.tile(run.slots, per_epoch)
        steps, unit = steps[is_left] - run.step, self.units.unit[samples[: len(is_left)][is_left]]
        first = np.full(len(self.units), NEVER, np.int64)
        last = np.full(len(self.units), -1, np.int64)
        np.minimum.at(first, unit, steps)
        np.maximum.at(last, unit, steps)
        return EpochPlan(first, last)


@dataclass(frozen=True)
class CacheShare:
    """How a limit is divided, in bytes."""

    limit: int
    val: int  # the validation tar
    in_use: int  # the most that is used at one step
    in_flight: int
    total: int  # of all units with images
    used: int  # of those that this node uses in the next epochs

    @property
    def least(self) -> int:
        """The least limit that the order allows."""
        return self.val + self.in_use + self.in_flight

    @property
    def keep(self) -> int:
        """What stays for good."""
        return min(self.total, max(0, self.limit - self.least))

    @property
    def later(self) -> int:
        """What each later epoch fetches."""
        return max(0, self.used - self.keep)


def share_cache(
    limit: int, val: int, units: Units, plans: list[EpochPlan], connections: int, is_part: bool
) -> CacheShare:
    """How a limit is divided, by the plans of the next epochs; 0: all that is used is kept.

    is_part: some units are used on other nodes alone.
    """
    num_bytes = units.num_bytes
    has_images = units.group != EMPTY
    in_use = max((plan.find_peak(num_bytes) for plan in plans), default=0)
    largest_first = np.sort(num_bytes[has_images])[::-1]
    in_flight = int(largest_first[: UNITS_A_CONNECTION * connections].sum())
    total = int(num_bytes[has_images].sum())
    is_used = np.any([plan.last >= 0 for plan in plans], axis=0) if is_part else has_images
    used = int(num_bytes[is_used].sum())
    in_flight = min(in_flight, used - in_use)
    return CacheShare(
        limit or val + in_use + in_flight + total, val, in_use, in_flight, total, used
    )
