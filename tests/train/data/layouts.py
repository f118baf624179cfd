"""Stand-ins for data sets as they lie in a tar, and how well an order mixes their samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dataset.archive.tar_header import BLOCK
from dataset.archive.units import EMPTY, UNIT_SIZE, Units, cut_units
from train.data.streamed_order import Layout

Int64s = npt.NDArray[np.int64]
MEAN_BYTES = 115_000  # of an image of ImageNet in its tar


@dataclass(frozen=True)
class Stand:
    """A set without its bytes, its samples numbered by (class, name)."""

    label: Int64s
    place: Int64s  # of each sample in the tar: 0 is the first
    units: Units
    layout: Layout

    def __len__(self) -> int:
        return len(self.label)


def make_stand(
    per_class: Sequence[int] | Int64s,
    mean_bytes: int = MEAN_BYTES,
    *,
    in_random_order: bool = False,
    seed: int = 0,
) -> Stand:
    """Classes one after the other in the tar, but neither classes nor names in sorted order."""
    random = np.random.default_rng(seed)
    label = np.repeat(np.arange(len(per_class)), per_class)
    num = len(label)
    place = np.lexsort((random.random(num), random.permutation(len(per_class))[label]))
    if in_random_order:
        place = random.permutation(num)
    spread = random.lognormal(0, 0.75, num) * random.lognormal(0, 0.25, len(per_class))[label]
    size = np.maximum(2000, spread / spread.mean() * (mean_bytes - 768)).astype(np.int64)
    offset = np.empty(num, np.int64)
    ends = np.cumsum((size[place] + BLOCK - 1 & -BLOCK) + BLOCK)
    offset[place] = np.append(0, ends[:-1]) + BLOCK
    units = cut_units(offset, size, label, int(ends[-1]) + 2 * BLOCK, UNIT_SIZE)
    return Stand(label, np.argsort(place), units, make_layout(units))


def make_layout(units: Units) -> Layout:
    return Layout(units.unit, units.group, int(units.num_bytes[units.group != EMPTY].sum()))


def imagenet_counts() -> Int64s:
    """896 classes of 1,300 images, the others of fewer: 1,281,167 images."""
    random = np.random.default_rng(0)
    counts = np.full(1000, 1300)
    fewer = random.choice(1000, 104, replace=False)
    counts[fewer] = 732 + np.sort(random.integers(0, 568, 104))
    counts[fewer] += (1_281_167 - counts.sum()) // 104
    counts[fewer[: 1_281_167 - counts.sum()]] += 1
    return counts


@dataclass(frozen=True)
class Mix:
    """How an order mixes a set, for one batch size."""

    fewest_classes: int  # in a batch
    mean_classes: float
    pairs: float  # pairs of one class in a batch; a uniform order has 1
    mates: float  # unit-mates of an image in its batch; spread evenly over the window: 1
    live: float  # the most bytes of units that are begun and not done, in windows


def measure(stand: Stand, order: Int64s, batch: int, window: int) -> Mix:
    """The figures of an order over all whole batches."""
    step = np.repeat(np.arange(len(order) // batch), batch)
    used = order[: len(step)]
    classes, class_pairs = count_in_steps(step, stand.label[used])
    _, unit_pairs = count_in_steps(step, stand.layout.unit[used])
    same_class, same_unit = pair_share(stand.label), pair_share(stand.layout.unit)
    pairs_by_chance = len(step) * (batch - 1) * same_class
    allowed = len(step) * (len(stand) - 1) * same_unit * min(1, batch / window)
    window_bytes = window * stand.layout.num_bytes / len(stand)
    return Mix(
        int(classes.min()),
        float(classes.mean()),
        class_pairs / pairs_by_chance,
        unit_pairs / max(1, allowed),
        find_live_bytes(stand, order) / window_bytes,
    )


def count_in_steps(step: Int64s, kind: Int64s) -> tuple[Int64s, int]:
    """The different kinds in each step, and all ordered pairs of one kind in one step."""
    num_kinds = int(kind.max()) + 1
    cells, counts = np.unique(step * num_kinds + kind, return_counts=True)
    return np.bincount(cells // num_kinds), int((counts * (counts - 1)).sum())


def pair_share(kind: Int64s) -> float:
    """How many of all ordered pairs of samples are of one kind."""
    counts = np.bincount(kind)
    return float((counts * (counts - 1)).sum() / (len(kind) * (len(kind) - 1)))


def find_live_bytes(stand: Stand, order: Int64s) -> int:
    """The most bytes of units of which some image was used and another is still to come."""
    unit = stand.layout.unit[order]
    used, first = np.unique(unit, return_index=True)
    num_bytes = stand.units.num_bytes[used]
    last = len(unit) - 1 - np.unique(unit[::-1], return_index=True)[1]
    change = np.zeros(len(unit) + 1, np.int64)
    np.add.at(change, first, num_bytes)
    np.subtract.at(change, last + 1, num_bytes)
    return int(np.cumsum(change).max())


def shuffle_in_buffer(place: Int64s, size: int) -> Int64s:
    """File order through a buffer, of which each step takes one at random: the usual way.

    An image stays for an exponential time; place is where each sample stands in the file.
    """
    random = np.random.default_rng(0)
    return np.argsort(np.maximum(place - size, 0) + size * random.exponential(size=len(place)))
