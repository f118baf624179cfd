"""The order that a run takes its samples in: uniform, or streamed along the units of a tar."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

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

    @property
    def name(self) -> str:
        return STREAMED if self.layout is not None else UNIFORM

    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same for a run to go on in this order."""
        if self.layout is None:
            return {"order": self.name}
        return {"order": self.name, "units": self.units, "window": self.window}

    def permute(self, seed: int, epoch: int, num_samples: int) -> Int64s:
        """The permutation of an epoch."""
        if self.layout is None:
            return epoch_order(seed, epoch, num_samples)
        assert len(self.layout) == num_samples, (len(self.layout), num_samples)
        return streamed.streamed_order(seed, epoch, self.layout, self.window)

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
        num, units = len(self.layout), len(self.layout.group)
        width = "all" if self.window >= num else f"a window of {self.window:,}"
        return f"{self.name}, {width} of {num:,} images, {units:,} units ({self.units[:12]})"

    def note_narrow(self, batch_size: int) -> str:
        """Why little of a transfer can be hidden behind this order; mostly an empty string."""
        num_batches = streamed.NUM_BATCHES
        if self.layout is None or 2 * num_batches * batch_size <= len(self.layout):
            return ""
        return (
            f"{num_batches} batches of {batch_size:,} are more than half of the set: "
            "little of a transfer can be hidden behind the training"
        )


def order_along(layout: Layout, units: str, batch_size: int, window: int | None) -> SampleOrder:
    """The streamed order of a layout; a run that goes on keeps its window."""
    return SampleOrder(layout, window or streamed.choose_window(layout, batch_size), units)
