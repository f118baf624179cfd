"""Lanes: a training set dealt out to nodes with disks of their own, by whole units (no torch).

The units of every class are dealt to the lanes in turn, by the seed alone: a node needs the same
units in every epoch. A class with fewer units than lanes is dealt anew each epoch, so that no lane
is without it for ever. Then the images are counted off, lane by lane, into equal parts: some units
at the end of a lane go to the next one, and the unit at a border belongs to both. So every lane
has the images for its slots of each step, none comes twice in an epoch, and what is left over is
dropped as ever: less than one batch in all, others every epoch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from train.data.sampler import Int64s, make_words

_DEAL_KEYS, _DEAL_OFFSETS, _ANEW = 0x0DE4, 0x0DE5, 0x0DE6


def deal_samples(seed: int, epoch: int, unit: Int64s, group: Int64s, lanes: int) -> list[Int64s]:
    """The samples of each lane, by number; their numbers differ by one at most.

    unit: of each sample. group: of each unit, its class.
    """
    num_samples, num_units = len(unit), len(group)
    in_line = _line_up(seed, epoch, group, lanes)
    images = np.bincount(unit, minlength=num_units)
    end = np.empty(num_units, np.int64)  # of each unit, when all are lined up lane by lane
    end[in_line] = np.cumsum(images[in_line])
    begin = end - images
    borders = np.array([-(-number * num_samples // lanes) for number in range(1, lanes)])
    # Sorting the samples by the places of their units would take as long as all the rest.
    lane_of_unit = np.searchsorted(borders, begin, side="right").astype(np.int32)
    lane = lane_of_unit[unit]
    is_cut = np.searchsorted(borders, end - 1, side="right") > lane_of_unit
    for number in np.flatnonzero(is_cut & (images > 0)):
        members = np.flatnonzero(unit == number)
        places = begin[number] + np.arange(len(members))
        lane[members] = np.searchsorted(borders, places, side="right")
    return [np.flatnonzero(lane == number) for number in range(lanes)]


def _line_up(seed: int, epoch: int, group: Int64s, lanes: int) -> Int64s:
    """The units, lane by lane, each lane's in the order of their keys."""
    number = np.arange(len(group))
    _, kind, num_units = np.unique(group, return_inverse=True, return_counts=True)
    is_small = num_units[kind] < lanes

    def draw(counters: Int64s, tag: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
        words = make_words(counters, seed, tag)
        words[is_small] = make_words(counters[is_small], seed, epoch, tag, _ANEW)
        return words

    key = draw(number, _DEAL_KEYS)
    in_groups = np.lexsort((key, kind))
    first = np.cumsum(num_units) - num_units
    rank = np.empty(len(group), np.int64)
    rank[in_groups] = number - np.repeat(first, num_units)
    offset = (draw(group, _DEAL_OFFSETS) % np.uint64(lanes)).astype(np.int64)
    return np.lexsort((key, (rank + offset) % lanes))


def join_lanes(orders: Sequence[Int64s], batch_size: int) -> Int64s:
    """One order of all samples, of which each lane fills its own slots of each batch."""
    slots, num_samples = batch_size // len(orders), sum(map(len, orders))
    num_steps = num_samples // batch_size
    used = [order[: num_steps * slots].reshape(num_steps, slots) for order in orders]
    left = [order[num_steps * slots :] for order in orders]
    return np.concatenate([np.concatenate(used, axis=1).ravel(), *left])
