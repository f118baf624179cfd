"""The folder of a bounded cache: a file for each unit, and never more bytes than the limit.

What fits is kept for good: a unit that the epoch has used up is kept while there is room beside
what the training needs at a time. All others are freed when a unit that is used earlier needs their
place, the one with the latest use first. A place is taken before a transfer begins, so a unit on
its way counts as if it were here. The caller holds the lock.
"""

from __future__ import annotations

import errno
import logging
import os
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dataset.errors import UserError
from dataset.stream.spec import NEVER
from dataset.stream.unit_map import Int64s, UnitMap, name_unit
from dataset.stream.unit_plan import NextUses

log = logging.getLogger("trainyard.fetch")

PART = ".part"
Bools = npt.NDArray[np.bool_]


class UnitCache:
    """The units in one folder; `uses` says when each is needed."""

    def __init__(
        self, folder: Path, units: UnitMap, uses: NextUses, limit: int, keep_bytes: int
    ) -> None:
        self.folder, self.map, self.uses = folder, units, uses
        self.limit, self._keep_bytes = limit, keep_bytes
        num = len(units.here)
        self._num_bytes = np.diff(units.bounds)
        self.has_place = np.zeros(num, bool)  # here, on its way, or found and not yet verified
        self.is_found = np.zeros(num, bool)  # its file is here, not yet verified
        self._is_kept = np.zeros(num, bool)
        self._pinned = np.full(num, -1, np.int64)  # until which step a reader's wish holds it
        self._adopt()

    @property
    def used_bytes(self) -> int:
        """What lies on the disk, and what is on its way there."""
        return int(self._num_bytes[self.has_place].sum())

    @property
    def first_need(self) -> int:
        """The step that needs the first unit that is not here."""
        return int(np.where(self.map.here == 1, NEVER, self.uses.values).min())

    # What an earlier start left

    def _adopt(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        known = {name_unit(unit): unit for unit in range(len(self._num_bytes))}
        for entry in list(os.scandir(self.folder)):
            unit = known.get(entry.name)
            if unit is None or entry.stat().st_size != self._num_bytes[unit]:
                Path(entry.path).unlink()
                continue
            self.has_place[unit] = True
            is_same = self.map.here[unit] and self.map.is_unchanged(unit, entry.stat())
            self.is_found[unit] = not is_same
        lost = (self.map.here == 1) & (~self.has_place | self.is_found)
        self.map.here[lost] = 0

    def settle(self) -> None:
        """Keeps what is used up and fits; frees what is above the limit. After each new step."""
        kept = int(self._num_bytes[self._is_kept].sum())
        is_new = self.has_place & ~self._is_kept & self.uses.is_used_up()
        for unit in np.flatnonzero(is_new & (self.map.here == 1)).tolist():
            if kept + self._num_bytes[unit] <= self._keep_bytes:
                self._is_kept[unit] = True
                kept += int(self._num_bytes[unit])
        while self.used_bytes > self.limit and self._free_latest(-1, self.has_place):
            pass

    def _keep_less(self) -> None:
        """Keeps no more than fits now; what is used last gives way."""
        kept = int(self._num_bytes[self._is_kept].sum())
        for unit in np.argsort(-self._find_uses(), kind="stable").tolist():
            if kept <= self._keep_bytes:
                return
            if self._is_kept[unit]:
                self._is_kept[unit] = False
                kept -= int(self._num_bytes[unit])

    # Places

    def next_use(self, unit: int) -> int:
        """The step that needs a unit next."""
        return int(self._find_uses()[unit])

    def _find_uses(self) -> Int64s:
        """By the plan; a pinned unit comes right behind what the step under way needs."""
        pinned = np.where(self._pinned >= self.uses.step, self.uses.step + 1, NEVER)
        return np.minimum(self.uses.values, pinned)

    def find_missing(self, is_busy: Bools) -> int | None:
        """The unit that is needed first of those that are not here and that nobody works on."""
        uses = np.where((self.map.here == 1) | is_busy, NEVER, self._find_uses())
        unit = int(uses.argmin())
        return unit if uses[unit] < NEVER else None

    def take_place(self, unit: int) -> bool:
        """Makes room for a unit; False if all that is here is needed before it."""
        if self.has_place[unit]:
            return True
        need, size = self.next_use(unit), int(self._num_bytes[unit])
        is_asked = bool(self.map.asked[unit])
        while self.used_bytes + size > self.limit:
            if not self._free_latest(need, ~self._is_kept) and not (
                is_asked and self._free_latest(need, self._is_kept)
            ):
                return False
        self.has_place[unit] = True
        return True

    def give_up_place(self, unit: int) -> None:
        """The unit is not coming."""
        if not self.map.here[unit]:
            self.has_place[unit] = False

    def _free_latest(self, need: int, among: Bools) -> bool:
        """Frees the unit that is used last, if that is after `need`; False without one."""
        is_file = (self.map.here == 1) | self.is_found
        uses = np.where(among & is_file & self.has_place, self._find_uses(), -1)
        unit = int(uses.argmax())
        if uses[unit] <= need:
            return False
        self.free(unit)
        return True

    def free(self, unit: int) -> None:
        """Removes a unit."""
        self.map.here[unit] = 0  # first: a reader that finds no file then waits
        self.is_found[unit] = self.has_place[unit] = self._is_kept[unit] = False
        self._path(unit).unlink(missing_ok=True)

    # Files

    def _path(self, unit: int) -> Path:
        return self.folder / name_unit(unit)

    def check_asked(self, unit: int, is_stuck: bool) -> bool:
        """Looks after a unit that a reader waits for; whether its file is lost or changed.

        A reader that is ahead of the step waits for its turn. One that replaces a bad image may
        wait for a unit that is planned for much later, or never: then no step is made.
        """
        if self.uses.values[unit] == NEVER or is_stuck:
            self._pinned[unit] = self.uses.step
        if not self.map.here[unit]:
            return False
        try:
            found = self._path(unit).stat()
        except FileNotFoundError:
            self.free(unit)
            return True
        if self.map.is_unchanged(unit, found):
            self.map.asked[unit] = 0
            return False
        self.map.here[unit] = 0
        if found.st_size == self._num_bytes[unit]:
            self.is_found[unit] = True  # perhaps only its time is another
        else:
            self.free(unit)
        return True

    def read_found(self, unit: int, crc32: int) -> bytes | None:
        """The bytes of a file that was found, if they are right. Needs no lock."""
        try:
            data = self._path(unit).read_bytes()
        except FileNotFoundError:
            return None
        return data if len(data) == self._num_bytes[unit] and zlib.crc32(data) == crc32 else None

    def write(self, unit: int, data: bytes | bytearray) -> int:
        """Writes a verified unit; the time of its file. Needs no lock."""
        part = self._path(unit).with_suffix(PART)
        try:
            part.write_bytes(data)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        written_ns = part.stat().st_mtime_ns
        part.rename(self._path(unit))
        return written_ns

    def stat_time(self, unit: int) -> int:
        """The time of a file that was found to be right."""
        return self._path(unit).stat().st_mtime_ns

    def lower_limit(self, error: OSError) -> None:
        """The disk is full: what lies there is the limit from now on; raises for other errors."""
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise error
        here = int(self._num_bytes[(self.map.here == 1) | self.is_found].sum())
        if here < self.limit:
            reserve = max(0, self.limit - self._keep_bytes)  # what the training needs at a time
            self.limit, self._keep_bytes = here, max(0, here - reserve)
            self._keep_less()
            log.warning("the disk is full: the cache is limited to %.2f GB now", here / 1e9)

    def refuse_small(self, unit: int) -> UserError:
        """The error for a limit that does not hold what one step needs."""
        in_use = self.uses.values <= self.uses.step
        least = int(self._num_bytes[in_use | (np.arange(len(in_use)) == unit)].sum())
        return UserError(
            f"the cache of {self.limit / 1e9:.3f} GB does not hold the {least / 1e9:.3f} GB of "
            f"units that step {self.uses.step} of this start uses; give a larger --cache-limit, or "
            "free some disk"
        )
