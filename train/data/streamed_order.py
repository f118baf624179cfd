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
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from train.data.sampler import Int64s, epoch_order, make_words

_UNIT_KEYS, _GROUP_OFFSETS, _IMAGE_UNIFORMS = 0x0DE1, 0x0DE2, 0x0DE3
_TURN_BITS = 32  # of a class's offset; a class may have 2**31 units
_PLACE_BITS = 30  # of an image's uniform; a set may have 2**32 images

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


def choose_window(layout: Layout, batch_size: int) -> int:
    """Over how many positions a unit's images are spread; len(layout) is a full shuffle.

    Two units of each class keep the classes of a batch mixed, 16 batches keep a unit's images
    apart, and 4 GiB serve sets of few classes; more than 16 GiB would be no window to hold.
    """
    least = int(MIN_BYTES * len(layout) // layout.num_bytes)
    most = int(MAX_BYTES * len(layout) // layout.num_bytes)
    window = max(_count_in_units(layout), NUM_BATCHES * batch_size, least)
    return max(1, min(len(layout), window, most))


def _count_in_units(layout: Layout) -> int:
    """The images in two mean units of each class; of a smaller class, all."""
    _, group = np.unique(layout.group, return_inverse=True)
    num_units = np.bincount(group)
    images = np.zeros(len(num_units), np.int64)
    np.add.at(images, group, layout.images_of_units)
    in_units = -(-UNITS_OF_EACH_CLASS * images // num_units)
    return int(np.minimum(images, in_units).sum())


def streamed_order(seed: int, epoch: int, layout: Layout, window: int) -> Int64s:
    """The permutation of an epoch; with a window of the whole set, that of epoch_order."""
    num_samples = len(layout)
    if window >= num_samples:
        return epoch_order(seed, epoch, num_samples)
    assert window > 0 and num_samples < 1 << 32, (window, num_samples)
    images = layout.images_of_units
    in_turn = np.argsort(_take_turns(seed, epoch, layout.group), kind="stable")
    until = np.empty_like(images)
    until[in_turn] = np.cumsum(images[in_turn])
    # Twice a(u) and twice the start: halves of images are whole numbers.
    start = np.clip(2 * until - images - window, 0, 2 * (num_samples - window))
    uniform = make_words(np.arange(num_samples), seed, epoch, _IMAGE_UNIFORMS)
    place = (uniform >> np.uint64(64 - _PLACE_BITS)).astype(np.int64) * (2 * window)
    place += (start << _PLACE_BITS)[layout.unit]
    return np.argsort(place, kind="stable").astype(np.int64)


def _take_turns(seed: int, epoch: int, group: Int64s) -> Int64s:
    """When each unit's turn comes, t(u), in parts of 2**32."""
    key = make_words(np.arange(len(group)), seed, epoch, _UNIT_KEYS)
    in_groups = np.lexsort((key, group))
    first = np.flatnonzero(np.diff(group[in_groups], prepend=group[in_groups[0]] - 1))
    num_units = np.diff(np.append(first, len(group)))
    rank = np.arange(len(group)) - np.repeat(first, num_units)
    offset = make_words(group[in_groups], seed, epoch, _GROUP_OFFSETS)
    ahead = (rank << _TURN_BITS) + (offset >> np.uint64(64 - _TURN_BITS)).astype(np.int64)
    turn = np.empty(len(group), np.int64)
    turn[in_groups] = ahead // np.repeat(num_units, num_units)
    return turn
