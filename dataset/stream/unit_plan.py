"""When a run uses each unit: a file an epoch, which the trainer writes and the fetcher follows.

Steps are counted from where the run goes on. An epoch has the first and the last step of each unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dataset.durable import writing_whole
from dataset.errors import DataError
from dataset.stream.spec import NEVER

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class EpochPlan:
    """The steps of one epoch that use each unit; a unit that none uses has NEVER and -1."""

    first: Int64s
    last: Int64s

    def find_peak(self, num_bytes: Int64s) -> int:
        """The most bytes that are in use at one step: of all units from their first to last."""
        used = self.last >= 0
        change = np.zeros(int(self.last.max(initial=0)) + 2, np.int64)
        np.add.at(change, self.first[used], num_bytes[used])
        np.add.at(change, self.last[used] + 1, -num_bytes[used])
        return int(np.cumsum(change).max(initial=0))


def name_plan(folder: Path, number: int) -> Path:
    """The file of the epoch that comes as number 0, 1, 2 ... since the run goes on."""
    return folder / f"plan-{number}"


def write_plan(folder: Path, number: int, plan: EpochPlan) -> None:
    """Writes the plan of an epoch, whole or not at all."""
    with writing_whole(name_plan(folder, number), is_synced=False) as file:
        file.write(np.stack([plan.first, plan.last]).astype("<i8").tobytes())


def read_plan(folder: Path, number: int, num_units: int) -> EpochPlan | None:
    """The plan of an epoch; None if the trainer has not written it yet."""
    try:
        numbers = np.frombuffer(name_plan(folder, number).read_bytes(), "<i8").astype(np.int64)
    except FileNotFoundError:
        return None
    if len(numbers) != 2 * num_units:
        raise DataError(f"{name_plan(folder, number)} is not for {num_units} units")
    return EpochPlan(*numbers.reshape(2, num_units))


class NextUses:
    """The next step that uses each unit, as far as the plans say."""

    def __init__(self, folder: Path, num_units: int) -> None:
        self._folder, self._num_units = folder, num_units
        self._plans: list[EpochPlan] = []
        self._num_read = 0
        self.step = 0
        self.least = NEVER  # the first step of all
        self.values = np.full(num_units, NEVER, np.int64)

    def follow(self, step: int) -> bool:
        """Goes on to a step that all ranks have reached; whether anything has changed."""
        plan = read_plan(self._folder, self._num_read, self._num_units)
        if plan is None and step == self.step and self._num_read:
            return False
        if plan is not None:
            self._plans.append(plan)
            self._num_read += 1
        self.step = step
        self._plans = [plan for plan in self._plans if plan.last.max(initial=-1) >= step]
        self.values = np.full(self._num_units, NEVER, np.int64)
        for plan in reversed(self._plans):  # an earlier use overwrites a later one
            comes = plan.last >= step
            self.values[comes] = np.maximum(plan.first[comes], step)
        self.least = min(self.least, int(self.values.min(initial=NEVER)))
        return True

    def is_used_up(self) -> npt.NDArray[np.bool_]:
        """Of each unit, whether its use in the epoch under way is over."""
        if not self._plans:
            return np.zeros(self._num_units, bool)
        return self._plans[0].last < self.step
