"""A crc32 for each unit of a tar, from one pass over it: whoever has one unit alone can check it.

Where the units are cut is known only after the pass. But a unit with images begins where an image
ends, and there every walk reads a header. So a pass notes the crc32 of all bytes before each header
that it reads, and the sums of the units follow from these.
"""

from __future__ import annotations

import os
import zlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dataset import checksum
from dataset.archive import units as unit_rules
from dataset.archive.tar_header import BLOCK
from dataset.archive.units import EMPTY, Int64s, Labels, Units, cut_units

Uint32s = npt.NDArray[np.uint32]
_READ = 4 << 20


@dataclass(frozen=True)
class UnitSums:
    """The crc32 of each unit; 0 for units without images, which no training reads."""

    version: int  # of the rules that cut the units
    unit_size: int
    values: Uint32s

    def belong_to(self, units: Units) -> bool:
        """Whether they are the sums of these units."""
        is_same = (self.version, self.unit_size) == (unit_rules.VERSION, units.unit_size)
        return is_same and len(self.values) == len(units)


class PrefixSums:
    """The crc32 of all bytes before some positions of a file that is read from front to back."""

    def __init__(self) -> None:
        self.position = self._value = 0
        self._marks, self._values = array("q", [0]), array("L", [0])

    def take(self, data: memoryview | bytes, begin: int) -> None:
        """Takes in the bytes that begin there, apart from those that it has."""
        known = self.position - begin
        assert known >= 0, "a gap"
        if known < len(data):
            self._value = zlib.crc32(memoryview(data)[known:], self._value)
            self.position = begin + len(data)

    def mark(self, data: memoryview | bytes, begin: int, position: int) -> None:
        """Notes a position in the bytes that begin there; not one that is behind it already."""
        if self.position <= position and begin <= position <= begin + len(data):
            self.take(memoryview(data)[: position - begin], begin)
            if self._marks[-1] != position:
                self._marks.append(position)
                self._values.append(self._value)

    def find(self, positions: Int64s) -> tuple[npt.NDArray[np.bool_], Uint32s]:
        """Which positions were noted, and the sum before each of those."""
        marks = np.append(np.array(self._marks, np.int64), self.position)
        values = np.append(np.array(self._values, np.uint32), np.uint32(self._value))
        places = np.minimum(np.searchsorted(marks, positions), len(marks) - 1)
        return marks[places] == positions, values[places]

    def pack(self) -> dict[str, npt.NDArray[Any]]:
        """Everything as arrays."""
        return {
            "prefix": np.array([self.position, self._value], np.int64),
            "prefix_marks": np.array(self._marks, np.int64),
            "prefix_values": np.array(self._values, np.uint32),
        }

    def unpack(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Goes on from what `pack` gave."""
        self.position, self._value = arrays["prefix"].tolist()
        self._marks = array("q", arrays["prefix_marks"].tolist())
        self._values = array("L", arrays["prefix_values"].tolist())


def sum_units(
    offset: Int64s,
    size: Int64s,
    label: Labels,
    tar_size: int,
    prefix: PrefixSums,
    fd: int | None = None,
) -> UnitSums | None:
    """The sums of all units, from those that a pass noted; None for a tar that has none.

    fd: of a local tar. A walk may have gone past a header there and come back; such a position was
    not noted, and the bytes before it are read once more.
    """
    units = cut_units(offset, size, label, tar_size, unit_rules.UNIT_SIZE)
    if not can_be_summed(units, offset, size):
        return None
    has_images = units.group != EMPTY
    begin, end = units.bounds[:-1][has_images], units.bounds[1:][has_images]
    sums = _xor_prefix(_get_prefixes(begin, prefix, fd), _get_prefixes(end, prefix, fd), begin, end)
    values = np.zeros(len(units), np.uint32)
    values[has_images] = sums
    return UnitSums(unit_rules.VERSION, units.unit_size, values)


def has_current_sums(
    sums: UnitSums | None, offset: Int64s, size: Int64s, label: Labels, tar_size: int
) -> bool:
    """Whether an index has the sums of units that would be written today."""
    units = cut_units(offset, size, label, tar_size, unit_rules.UNIT_SIZE)
    if sums is None:
        return not can_be_summed(units, offset, size)
    return sums.belong_to(units)


def can_be_summed(units: Units, offset: Int64s, size: Int64s) -> bool:
    """Whether every unit with images begins where an image ends, or at the start.

    Other files between the images, of more than a MiB, make cuts that no pass can foresee.
    """
    ends = np.append(offset + (size + BLOCK - 1 & -BLOCK), 0)
    return bool(np.isin(units.bounds[:-1][units.group != EMPTY], ends).all())


def _get_prefixes(positions: Int64s, prefix: PrefixSums, fd: int | None) -> Uint32s:
    is_noted, values = prefix.find(positions)
    for row in np.flatnonzero(~is_noted).tolist():
        assert fd is not None, f"no header was read at byte {positions[row]}"
        values[row] = _sum_before(int(positions[row]), prefix, fd)
    return values


def _sum_before(position: int, prefix: PrefixSums, fd: int) -> int:
    """The crc32 of all bytes before a position, read from the last one that was noted."""
    marks = prefix.pack()
    row = int(np.searchsorted(marks["prefix_marks"], position)) - 1
    begin, value = int(marks["prefix_marks"][row]), int(marks["prefix_values"][row])
    while begin < position:
        data = os.pread(fd, min(_READ, position - begin), begin)
        assert data, "the tar was cut off while it was read"
        value, begin = zlib.crc32(data, value), begin + len(data)
    return value


def _xor_prefix(before: Uint32s, until: Uint32s, begin: Int64s, end: Int64s) -> Uint32s:
    """The sums of [begin, end), from those of [0, begin) and [0, end)."""
    return append_zeros("crc32", before, end - begin) ^ until


def append_zeros(
    kind: str, values: npt.NDArray[np.uint32], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint32]:
    """For many crcs at once, what `combine` makes of each before the second one is added."""
    result = values.copy()
    for bit in range(int(lengths.max(initial=0)).bit_length()):
        is_set = (lengths >> bit & 1).astype(bool)
        vector, total = result[is_set], np.zeros(int(is_set.sum()), np.uint32)
        for row, column in enumerate(checksum.zeros_matrix(kind, 1 << bit)):
            total ^= (vector >> np.uint32(row) & np.uint32(1)) * np.uint32(column)
        result[is_set] = total
    return result
