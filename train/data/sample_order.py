"""The order that a run takes its samples in: uniform, or streamed along the units of a tar."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataset.errors import UserError
from dataset.words import count
from train.data import streamed_order as streamed
from train.data.sampler import Int64s, epoch_order
from train.data.streamed_order import Layout

UNIFORM, STREAMED = "uniform", "streamed"


@dataclass(frozen=True)
class SampleOrder:
    """A function of (seed, epoch), the same on every rank and in every worker."""

    layout: Layout | None = None  # None: uniform
    window: int = 0
    units: str = ""  # the digest of the cuts
    lanes: int = 1
    batch_size: int = 1  # of which each lane has its slots

    @property
    def name(self) -> str:
        return STREAMED if self.layout is not None else UNIFORM

    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same for a run to go on in this order."""
        if self.layout is None:
            return {"order": self.name}
        lanes = {"lanes": self.lanes} if self.lanes > 1 else {}  # as before there were any
        return {"order": self.name, "units": self.units, "window": self.window} | lanes

    def permute(self, seed: int, epoch: int, num_samples: int) -> Int64s:
        """The permutation of an epoch."""
        if self.layout is None:
            return epoch_order(seed, epoch, num_samples)
        assert len(self.layout) == num_samples, (len(self.layout), num_samples)
        return streamed.streamed_order(
            seed, epoch, self.layout, self.window, self.lanes, self.batch_size
        )

    def candidates(self, index: int, num_samples: int) -> Iterator[int]:
        """A sample, then all others in the order in which they replace it if it cannot be decoded.

        A uniform order takes the next by number. A streamed one takes the others of the same unit
        first, which is there when the sample is; then those of the next units of the tar.
        """
        yield index
        if self.layout is None:
            for ahead in range(1, num_samples):
                yield (index + ahead) % num_samples
            return
        unit, num_units = self.layout.unit, len(self.layout.group)
        for ahead in range(num_units):
            mates = np.flatnonzero(unit == (unit[index] + ahead) % num_units)
            if ahead == 0:
                mates = np.concatenate([mates[mates > index], mates[mates < index]])
            yield from mates.tolist()

    def describe(self) -> str:
        """The order for the log, with its window."""
        if self.layout is None:
            return self.name
        num, num_units = len(self.layout), len(self.layout.group)
        units = f"{num_units:,} unit{'s' * (num_units != 1)}"
        width = "all" if self.window * self.lanes >= num else f"a window of {self.window:,}"
        lanes = f" in each of {self.lanes} lanes" if self.lanes > 1 else ""
        return f"{self.name}, {width}{lanes} of {num:,} images, {units} ({self.units[:12]})"

    def note_narrow(self, batch_size: int) -> str:
        """Why little of a transfer can be hidden behind this order; mostly an empty string."""
        num_batches = streamed.NUM_BATCHES
        if self.layout is None or 2 * num_batches * batch_size <= len(self.layout):
            return ""
        return (
            f"{num_batches} batches of {batch_size:,} are more than half of the set: "
            "little of a transfer can be hidden behind the training"
        )


def name_order(asked: str, before: Mapping[str, Any], fresh: str) -> str:
    """The order that was asked for; of "auto" that of the run before, else that of a new one."""
    found: str = before.get("order", fresh) if asked == "auto" else asked
    return found


def order_as_before(
    layout: Layout,
    units: str,
    batch_size: int,
    before: Mapping[str, Any],
    lanes: int | None = None,
    fresh_lanes: int = 1,
) -> SampleOrder:
    """The streamed order of a layout, with lanes and window of the run before if they fit.

    before: its identity, empty for a new run. lanes: as asked for; None: those from before, else
    those of a new run.
    """
    was_streamed = before.get("order") == STREAMED
    lanes_before = before.get("lanes", 1) if was_streamed else fresh_lanes
    lanes = lanes or lanes_before
    is_same = before.get("units") == units and lanes == lanes_before
    window = before.get("window") if is_same else None
    return order_along(layout, units, batch_size, window if type(window) is int else None, lanes)


def order_along(
    layout: Layout, units: str, batch_size: int, window: int | None, lanes: int = 1
) -> SampleOrder:
    """The streamed order of a layout; a run that goes on keeps its window."""
    if batch_size % lanes:
        raise UserError(
            f"--batch-size {batch_size} cannot be cut into {count(lanes, 'lane')}; use a multiple "
            f"of {lanes}, or name other lanes for a new run: --order streamed:N"
        )
    window = window or streamed.choose_window(layout, batch_size, lanes)
    return SampleOrder(layout, window, units, lanes, batch_size if lanes > 1 else 1)
