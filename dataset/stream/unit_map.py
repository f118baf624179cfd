"""Which units of a tar are here: the map of a cache that holds a part of the tar at a time.

It is a map of arrivals with other parts: the bounds of the units, and of each unit
- whether it is here, and the time that its file was written: a file with another time was changed;
- whether a reader waits for it, which readers write and the fetcher clears;
- whether it has ever been here, and so its class was compared with the index.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dataset.errors import DataError
from dataset.stream.arrivals import HEAD_BYTES, ArrivalMap
from dataset.transfer.journal import CHUNK

Int64s = npt.NDArray[np.int64]
Uint8s = npt.NDArray[np.uint8]
_PER_UNIT = 2 * 8 + 3  # bytes


class UnitMap(ArrivalMap):
    """The map of the units of one tar."""

    bounds: Int64s
    written_ns: Int64s
    seen: Uint8s

    @classmethod
    def create_for(cls, path: Path, bounds: Int64s) -> UnitMap:
        """A new map of these units, none of which is here."""
        num_units = len(bounds) - 1
        cls._write(path, int(bounds[-1]), bounds.astype("<i8").tobytes() + bytes(11 * num_units))
        return cls(path)

    def _map_parts(self) -> None:
        length = len(self._memory) - HEAD_BYTES - 8
        if length < 0 or length % _PER_UNIT:
            raise DataError(f"{self.path} is not a map of units; start the run again")
        num, place = length // _PER_UNIT, HEAD_BYTES
        self.bounds = np.frombuffer(self._memory, np.int64, num + 1, place)
        self.written_ns = np.frombuffer(self._memory, np.int64, num, place + 8 * (num + 1))
        flags = np.frombuffer(self._memory, np.uint8, 3 * num, place + 8 * (2 * num + 1))
        self.here, self.asked, self.seen = flags.reshape(3, num)

    @property
    def progress(self) -> int:
        return self.tally.fetched // CHUNK

    def find(self, begin: int, end: int) -> range:
        """The units that the bytes [begin, end) lie in."""
        first, last = np.searchsorted(self.bounds, [begin, max(begin, end - 1)], side="right") - 1
        return range(int(first), int(last) + 1)

    def has(self, begin: int, end: int) -> bool:
        units = self.find(begin, end)
        return bool(self.here[units.start : units.stop].all())

    def ask(self, begin: int, end: int) -> None:
        units = self.find(begin, end)
        self.asked[units.start : units.stop] = 1

    def length(self, unit: int) -> int:
        """The bytes of a unit."""
        return int(self.bounds[unit + 1] - self.bounds[unit])

    def is_unchanged(self, unit: int, found: os.stat_result) -> bool:
        """Whether a file is the one that was verified."""
        is_whole = found.st_size == self.length(unit)
        return is_whole and found.st_mtime_ns == self.written_ns[unit]

    # What the fetcher writes

    def mark_written(self, unit: int, written_ns: int) -> None:
        """The unit is here and right, in a file of that time."""
        self.written_ns[unit] = written_ns
        self.seen[unit] = 1
        self.here[unit] = 1
        self.asked[unit] = 0


def name_unit(unit: int) -> str:
    """The name of a unit's file in the folder of the cache."""
    return f"{unit:07d}"


def find_unit(bounds: Int64s, positions: Int64s) -> Int64s:
    """The unit that each byte lies in."""
    return np.searchsorted(bounds, positions, side="right") - 1
