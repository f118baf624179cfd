"""An order of training that can be streamed: a pure function of (seed, epoch) and the data's units.

A unit is a run of neighbouring images of a tar (dataset/archive/units.py). The units of every class
are spread evenly over the epoch, and the images of every unit over a window of W positions:

    t(u)     = (rank of u's key among the units of its class + offset of the class) / their number
    a(u)     = images before u when units are sorted by t, + half of its own
    start(u) = clip(a(u) - W / 2, 0, N - W)
    order    = argsort over images of start(unit) + W * uniform(image)

Keys, offsets and uniforms are splitmix64 counters, as in epoch_order. Everything is computed in
whole numbers, so that no machine can round its way to another order. Where two values are equal,
the lower unit or sample number comes first, as all sorts are stable.

With C lanes the units are dealt out first (train/data/lanes.py). Each lane has an order of its own
by the formulas above, with its own N and W, and fills 1/C of each batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from train.data.lanes import deal_samples, join_lanes
from train.data.sampler import Int64s, make_words

_UNIT_KEYS, _GROUP_OFFSETS, _IMAGE_UNIFORMS = 0x0DE1, 0x0DE2, 0x0DE3
_TURN_BITS = 32  # of a class's offset; a class may have 2**31 units
_PLACE_BITS = 30  # of an image's uniform; a set may have 2**32 images

MAX_TIES = 1000  # more are sorted at once; an order of ImageNet has hardly one

UNITS_OF_EACH_CLASS = 2
NUM_BATCHES = 16
MIN_BYTES, MAX_BYTES = 4 << 30, 16 << 30


@dataclass(frozen=True)
class Layout:
    """Where the samples of a set lie, as far as their order depends on it."""

    unit: Int64s  # of each sample
    group: Int64s  # of each unit: its class; units that belong to none have negative numbers
    num_bytes: int  # of all units with images

    def __len__(self) -> int:
        return len(self.unit)

    @property
    def images_of_units(self) -> Int64s:
        """The number of images of each unit, which may be 0."""
        return np.bincount(self.unit, minlength=len(self.group)).astype(np.int64)


def choose_window(layout: Layout, batch_size: int, lanes: int = 1) -> int:
    """Over how many positions of a lane a unit's images are spread; all of it is a full shuffle.

    Two units of each class keep the classes of a batch mixed, 16 batches keep a unit's images
    apart, and 4 GiB serve sets of few classes; more than 16 GiB would be no window to hold. Each of
    several lanes has a window by the same rule: what one lane gives to a batch is as well mixed.
    """
    least = int(MIN_BYTES * len(layout) // layout.num_bytes)
    most = int(MAX_BYTES * len(layout) // layout.num_bytes)
    window = max(_count_in_units(layout, lanes), NUM_BATCHES * batch_size // lanes, least)
    return max(1, min(-(-len(layout) // lanes), window, most))


def _count_in_units(layout: Layout, lanes: int) -> int:
    """The images in two mean units of each class; of a class that has less in a lane, all."""
    _, group = np.unique(layout.group, return_inverse=True)
    num_units = np.bincount(group)
    images = np.zeros(len(num_units), np.int64)
    np.add.at(images, group, layout.images_of_units)
    in_units = -(-UNITS_OF_EACH_CLASS * images // num_units)
    return int(np.minimum(-(-images // lanes), in_units).sum())


@dataclass(frozen=True)
class Lane:
    """One of the lanes of an order; with one lane, the whole."""

    number: int = 0
    of: int = 1


def streamed_order(
    seed: int, epoch: int, layout: Layout, window: int, lanes: int = 1, batch_size: int = 1
) -> Int64s:
    """The permutation of an epoch; with a window of the whole set, that of epoch_order.

    With several lanes, slot s of each batch is of lane s * lanes // batch_size.
    """
    if lanes == 1:
        return _order_lane(seed, epoch, layout, np.arange(len(layout)), window, Lane())
    dealt = deal_samples(seed, epoch, layout.unit, layout.group, lanes)
    orders = [
        _order_lane(seed, epoch, layout, samples, window, Lane(number, lanes))
        for number, samples in enumerate(dealt)
    ]
    return join_lanes(orders, batch_size)


def _order_lane(
    seed: int, epoch: int, layout: Layout, samples: Int64s, window: int, lane: Lane
) -> Int64s:
    """The samples of a lane in the order of an epoch."""
    num_samples = len(samples)
    if window >= num_samples:
        return samples[np.argsort(make_words(samples, seed, epoch), kind="stable")]
    assert window > 0 and num_samples < 1 << 32, (window, num_samples)
    units, unit = np.arange(len(layout.group)), layout.unit[samples]
    images = np.bincount(unit, minlength=len(units)).astype(np.int64)
    if lane.of > 1:  # a unit without images has a turn in the one lane, as it always had
        units = np.flatnonzero(images)
        number = np.empty(len(images), np.int64)
        number[units] = np.arange(len(units))
        unit, images = number[unit], images[units]
    turns = _take_turns(seed, epoch, units, layout.group[units], lane)
    in_turn = np.argsort(turns, kind="stable")
    until = np.empty_like(images)
    until[in_turn] = np.cumsum(images[in_turn])
    # Twice a(u) and twice the start: halves of images are whole numbers.
    start = np.clip(2 * until - images - window, 0, 2 * (num_samples - window))
    uniform = make_words(samples, seed, epoch, _IMAGE_UNIFORMS)
    place = (uniform >> np.uint64(64 - _PLACE_BITS)).astype(np.int64) * (2 * window)
    place += (start << _PLACE_BITS)[unit]
    return samples[sort_stably(place)]


def sort_stably(keys: Int64s) -> Int64s:
    """As a stable argsort, in a third of its time: few keys are equal, and these are put right."""
    order = np.argsort(keys)
    in_order = keys[order]
    ties = np.flatnonzero(in_order[1:] == in_order[:-1])
    if len(ties) > MAX_TIES:
        return np.argsort(keys, kind="stable")
    for run in np.split(ties, np.flatnonzero(np.diff(ties) > 1) + 1) if len(ties) else ():
        order[run[0] : run[-1] + 2].sort()
    return order


def _take_turns(seed: int, epoch: int, units: Int64s, group: Int64s, lane: Lane) -> Int64s:
    """When each unit's turn comes, t(u), in parts of 2**32.

    The lanes take turns too: the offsets of a class are a C-th apart, in an order that its own
    offset begins.
    """
    key = make_words(units, seed, epoch, _UNIT_KEYS)
    in_groups = np.lexsort((key, group))
    first = np.flatnonzero(np.diff(group[in_groups], prepend=group[in_groups[0]] - 1))
    num_units = np.diff(np.append(first, len(group)))
    rank = np.arange(len(group)) - np.repeat(first, num_units)
    word = make_words(group[in_groups], seed, epoch, _GROUP_OFFSETS)
    offset = (word >> np.uint64(64 - _TURN_BITS)).astype(np.int64)
    turn_of_lane = (lane.number + (word % np.uint64(lane.of)).astype(np.int64)) % lane.of
    offset = ((turn_of_lane << _TURN_BITS) + offset) // lane.of
    turn = np.empty(len(group), np.int64)
    turn[in_groups] = ((rank << _TURN_BITS) + offset) // np.repeat(num_units, num_units)
    return turn
