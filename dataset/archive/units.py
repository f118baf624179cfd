"""A tar cut into units: runs of neighbouring images of about 2 MiB, a pure function of its index.

Every byte of the tar is in exactly one unit, and every image in exactly one, together with all
headers before it and the padding behind it: whoever has a unit can check its images' headers.

The rules of VERSION 1:
- What lies between two images belongs to the one behind it: its headers, and at a class border the
  end of one class tar and the header of the next.
- A longer stretch without images (a tar that also holds val) is cut into units of its own. Only
  its last MAX_HEADERS bytes belong to the image behind it.
- Runs of one class are joined until they have half a unit. What was joined is cut into equal parts,
  as close to a unit as possible; an image belongs to the part that its middle is in.
So images are never cut, and a class border alone makes a cut only behind at least half a unit.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dataset.archive.tar_header import BLOCK
from dataset.errors import DataError

Int64s = npt.NDArray[np.int64]
Labels = npt.NDArray[np.integer]

VERSION = 1  # of the rules: other cuts are another order of training
UNIT_SIZE = 2 << 20
MIXED, EMPTY = -1, -2  # groups of units that belong to no class
MAX_HEADERS = (1 << 20) + 2 * BLOCK  # of one file: tar_header reads name records of 1 MiB at most


@dataclass(frozen=True)
class Units:
    """Unit u is the bytes [bounds[u], bounds[u + 1]) of the tar."""

    bounds: Int64s
    group: Int64s  # of each unit: the class of its images, MIXED, or EMPTY (fetched last)
    unit: Int64s  # of each image, in the order of the index
    unit_size: int  # what was aimed at

    def __len__(self) -> int:
        return len(self.group)

    @property
    def num_bytes(self) -> Int64s:
        """The bytes of each unit."""
        return np.diff(self.bounds)

    @property
    def digest(self) -> str:
        """SHA-256 of the cuts: equal digests are equal orders of training, on any machine."""
        numbers = [VERSION, self.unit_size, len(self), len(self.unit)]
        sha = hashlib.sha256(b"trainyard units\n")
        for array in (np.array(numbers), self.bounds, self.group, self.unit):
            sha.update(array.astype("<i8").tobytes())
        return sha.hexdigest()


def cut_units(
    offset: Int64s, size: Int64s, label: Labels, tar_size: int, unit_size: int = UNIT_SIZE
) -> Units:
    """The units of a tar, from what its index says: any format of it, images in any order."""
    assert unit_size >= BLOCK and len(offset) > 0, (unit_size, len(offset))
    in_tar = np.argsort(offset, kind="stable")  # sample numbers are ranks of (class, name)
    begin, end = _find_extents(offset[in_tar], size[in_tar], tar_size, unit_size)
    labels = label[in_tar].astype(np.int64)
    first = _cut_images(begin, end, labels, unit_size)
    low, high = np.minimum.reduceat(labels, first), np.maximum.reduceat(labels, first)
    empty = _cut_stretches(begin, end, tar_size, unit_size)

    starts = np.concatenate([begin[first], empty])
    groups = np.concatenate([np.where(low == high, low, MIXED), np.full(len(empty), EMPTY)])
    in_order = np.argsort(starts, kind="stable")
    bounds = np.append(starts[in_order], tar_size)
    unit = np.empty(len(offset), np.int64)
    unit[in_tar] = np.searchsorted(bounds, begin, side="right") - 1
    return Units(bounds, groups[in_order], unit, unit_size)


def _find_extents(
    offset: Int64s, size: Int64s, tar_size: int, unit_size: int
) -> tuple[Int64s, Int64s]:
    """Where each image begins, its headers included, and where its padding ends, in tar order."""
    end = np.minimum(offset + (size + BLOCK - 1 & -BLOCK), tar_size)
    gap = offset - np.concatenate([[0], end[:-1]])
    wrong = np.flatnonzero(gap < BLOCK)
    if len(wrong):
        raise DataError(
            f"the index has an image at byte {offset[wrong[0]]} without room for its header "
            f"({gap[wrong[0]]} bytes before it); write it again: scripts/index_tar.py TAR"
        )
    is_stretch = gap >= MAX_HEADERS + unit_size // 2
    begin = offset - np.where(is_stretch, MAX_HEADERS, gap)
    if tar_size - end[-1] < unit_size // 2:
        end[-1] = tar_size
    return begin, end


def _cut_images(begin: Int64s, end: Int64s, labels: Int64s, unit_size: int) -> Int64s:
    """The first image of each unit with images, in tar order."""
    is_border = np.append(True, (np.diff(labels) != 0) | (begin[1:] != end[:-1]))
    borders = np.flatnonzero(is_border)
    first = borders[_join_runs(begin[borders].tolist(), unit_size // 2)]
    last = np.append(first[1:], len(begin)) - 1
    width = _divide(end[last] - begin[first], unit_size)

    lengths = last - first + 1
    middle = (begin + end) // 2 - np.repeat(begin[first], lengths)
    part = middle // np.repeat(width, lengths)
    is_first = np.append(True, np.diff(part) != 0)
    is_first[first] = True
    return np.flatnonzero(is_first)


def _join_runs(starts: list[int], half: int) -> list[int]:
    """Which runs begin a stretch of at least half a unit; a list, as bisect is fast on those.

    A stretch without images is at least as long, so none is joined across it.
    """
    joined = [0]
    while (run := bisect_left(starts, starts[joined[-1]] + half, joined[-1] + 1)) < len(starts):
        joined.append(run)
    return joined


def _cut_stretches(begin: Int64s, end: Int64s, tar_size: int, unit_size: int) -> Int64s:
    """Where each unit without images begins."""
    before, after = np.append(0, end), np.append(begin, tar_size)
    before, after = before[after > before], after[after > before]
    width = _divide(after - before, unit_size)
    num_parts = -(-(after - before) // width)
    number = np.arange(num_parts.sum()) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    starts: Int64s = np.repeat(before, num_parts) + number * np.repeat(width, num_parts)
    return starts


def _divide(total: Int64s, unit_size: int) -> Int64s:
    """The width of equal parts, as close to a unit as possible, for stretches of total bytes."""
    num_parts = np.maximum(1, (total + unit_size // 2) // unit_size)
    return -(-total // num_parts)
