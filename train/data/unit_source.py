"""The images of a tar of which only some units are here at a time, a file each (no torch).

A unit that is not here is waited for. A file that is gone, or that is not the one that the fetcher
verified, is asked for again: then the fetcher looks after it. Files are opened for each read, so
that the space of a freed unit is free at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dataset.archive.index_file import TarIndex
from dataset.stream.unit_map import UnitMap, find_unit, name_unit
from train.data.network_meter import NetworkMeter
from train.data.stream_source import FIRST_PAUSE_S, MAX_PAUSE_S, StreamSource

PROOFS_AT_ONCE = 32


class UnitSource(StreamSource):
    """The images of an indexed tar in a bounded cache."""

    keeps_all = False
    arrivals: UnitMap

    def __init__(self, index: TarIndex, units: UnitMap, folder: Path, meter: NetworkMeter) -> None:
        super().__init__(index, units, meter)
        self._folder = folder
        self._first_image_at = self.proofs[1]  # of each class that a header tells
        self._labels = np.unique(index.label)[: len(self._first_image_at)]
        self._is_left = np.ones(len(self._labels), bool)  # to be proven on this node

    def list_unproven(self) -> list[str]:
        """The classes whose class tar has not come; the fetcher looks at it when it comes."""
        return [self.index.classes[label] for label in self._labels[self._find_unproven()]]

    def prove_only(self, classes: Collection[str]) -> None:
        """The other classes are proven on other nodes."""
        is_left = [self.index.classes[label] in classes for label in self._labels]
        self._is_left = np.array(is_left, bool)  # also where no header tells a class

    def _find_unproven(self) -> npt.NDArray[np.intp]:
        units = find_unit(self.arrivals.bounds, self._first_image_at)
        return np.flatnonzero((self.arrivals.seen[units] == 0) & self._is_left)

    def ask_for_proofs(self) -> None:
        """Asks for some units that prove a class, which the training has not used."""
        units = find_unit(self.arrivals.bounds, self._first_image_at)[self._find_unproven()]
        self.arrivals.asked[np.unique(units)[:PROOFS_AT_ONCE]] = 1

    def _compare(self, index: int, header: bytes) -> None:
        """Compares the image itself; its class is the fetcher's to look at."""
        self._headers.check(index, header, self._pread, lambda begin, end: False)

    def _read_bytes(self, size: int, offset: int, where: str, ahead: int) -> bytes:
        if self.arrivals.has(offset - ahead, offset + size):
            self._meter.count_hit()
        return self._pread(ahead + size, offset - ahead)

    def _pread(self, size: int, offset: int) -> bytes:
        end = min(offset + size, self.index.tar_size)
        parts = []
        for unit in self.arrivals.find(offset, end):
            begin = int(self.arrivals.bounds[unit])
            stop = min(end, int(self.arrivals.bounds[unit + 1]))
            parts.append(self._read_unit(unit, max(offset, begin) - begin, stop - begin))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read_unit(self, unit: int, first: int, last: int) -> bytes:
        """The bytes [first, last) of a unit, once it is here."""
        begin, end = self.arrivals.bounds[unit : unit + 2].tolist()
        pause_s = FIRST_PAUSE_S
        while (data := self._try_unit(unit, first, last)) is None:
            self.arrivals.ask(begin, end)
            self._wait_for(begin, end)
            time.sleep(pause_s)  # the fetcher has yet to see that a file is gone
            pause_s = min(MAX_PAUSE_S, 1.5 * pause_s)
        return data

    def _try_unit(self, unit: int, first: int, last: int) -> bytes | None:
        if not self.arrivals.here[unit]:
            return None
        try:
            fd = os.open(self._folder / name_unit(unit), os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        try:
            if not self.arrivals.is_unchanged(unit, os.fstat(fd)):
                return None
            data = os.pread(fd, last - first, first)
            is_same = self.arrivals.is_unchanged(unit, os.fstat(fd))
            return data if len(data) == last - first and is_same else None
        finally:
            os.close(fd)
