"""A bounded cache of a small tar, filled in this process; a test plays the trainer."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from dataset.archive import units
from dataset.archive.index import build_index
from dataset.archive.index_file import TarIndex, cut_as_summed
from dataset.errors import CommandError
from dataset.federation.lookup import Options
from dataset.fetch.request import Request
from dataset.stream.bounded import fetch_units
from dataset.stream.spec import NEVER, CacheSpec, StreamedObject
from dataset.stream.unit_fetch import UnitFetch
from dataset.stream.unit_map import UnitMap, name_unit
from dataset.stream.unit_plan import EpochPlan, write_plan
from tests.dataset.object_fetch import NOWHERE
from tests.dataset.stream.streams import wait_until
from tests.dataset.tars import TRAIN, nested_bytes

CLASSES, PER_CLASS, IMAGE = 4, 12, 10_000
UNIT = 25_000
TREE = {
    f"n{c:08d}": {f"n{c:08d}_{i:02d}.JPEG": os.urandom(IMAGE) for i in range(PER_CLASS)}
    for c in range(CLASSES)
}
CONTENT = nested_bytes(TREE)


@dataclass
class Bounded:
    """A cache with its map, plans and fetcher."""

    folder: Path
    index: TarIndex
    place: Path
    errors: list[CommandError] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.map = UnitMap.create_for(self.folder / "map", cut_as_summed(self.index).bounds)
        self.fetch: UnitFetch | None = None
        self._num_plans = 0

    @property
    def units(self) -> Path:
        return self.folder / "units"

    @property
    def num_bytes(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.diff(self.map.bounds)

    def plan(self, first: npt.ArrayLike, last: npt.ArrayLike | None = None) -> None:
        """The next epoch; a unit of which the first step is NEVER is not used."""
        firsts = np.array(first, np.int64)
        lasts = firsts if last is None else np.array(last, np.int64)
        write_plan(
            self.folder, self._num_plans, EpochPlan(firsts, np.where(firsts == NEVER, -1, lasts))
        )
        self._num_plans += 1

    def start(
        self, url: str, limit: int, keep: int = 0, give_up_s: float = 60.0, connections: int = 2
    ) -> None:
        """A fetcher of this cache, in a thread; its error is kept."""
        spec = CacheSpec(str(self.units), limit, keep, str(self.folder), 1)
        thing = StreamedObject(url, str(self.folder / TRAIN), str(self.map.path), str(self.place))
        options = Options(connections, 60.0, give_up_s, 0.5)
        request = Request(self.folder, options, environ=NOWHERE)
        self.fetch = None

        def run() -> None:
            try:
                fetch_units(thing, spec, request, self._note)
            except CommandError as error:
                self.errors.append(error)
            except InterruptedError:
                pass

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def _note(self, fetch: UnitFetch) -> None:
        self.fetch = fetch

    def stop(self) -> None:
        """Ends the fetcher as a kill would, as far as files go."""
        if self.thread.is_alive():
            wait_until(lambda: self.fetch is not None)
            assert self.fetch is not None
            self.fetch.fail(InterruptedError("the test is over"))
        self.thread.join()

    def step(self, step: int) -> None:
        """The trainer has come to a step."""
        self.map.note_step(0, step)

    def await_units(self, *numbers: int) -> None:
        """Waits until these units are here, or the fetcher has failed."""
        wait_until(lambda: bool(self.errors) or bool(self.map.here[list(numbers)].all()))
        assert not self.errors, self.errors

    def await_error(self) -> CommandError:
        self.thread.join(120)
        return self.errors[0]

    def file(self, unit: int) -> Path:
        return self.units / name_unit(unit)

    def bytes_of(self, unit: int) -> bytes:
        return CONTENT[self.map.bounds[unit] : self.map.bounds[unit + 1]]

    def measure(self) -> int:
        total = 0
        for file in self.units.iterdir():
            with suppress(FileNotFoundError):  # renamed or freed meanwhile
                total += file.stat().st_size
        return total


def make_bounded(folder: Path) -> Bounded:
    """An empty cache; its index has the sums of small units."""
    folder.mkdir(exist_ok=True)
    (folder / TRAIN).write_bytes(CONTENT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units, "UNIT_SIZE", UNIT)
        index, place = build_index(folder / TRAIN, checksums=True)
    (folder / TRAIN).unlink()
    return Bounded(folder, index, place)
