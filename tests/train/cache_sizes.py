"""How much disk a run with --cache-limit uses, again and again while it goes on; and its map."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dataset.own_names import part_path, units_path
from dataset.stream.unit_map import UnitMap
from tests.dataset.tars import TRAIN, VAL

POLL_S = 0.002


def measure(data: Path) -> int:
    """The bytes of all files that count for the limit, as their sizes say."""
    val = data / VAL
    total = 0
    for file in (*units_path(data / TRAIN).glob("*"), val, part_path(val)):
        with suppress(FileNotFoundError):  # freed meanwhile, or not there yet
            total += file.stat().st_size
    return total


@contextmanager
def sampling(data: Path) -> Iterator[list[int]]:
    """The sizes while a run goes on; the first is 0."""
    sizes, is_over = [0], threading.Event()

    def sample() -> None:
        while not is_over.wait(POLL_S):
            sizes.append(measure(data))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield sizes
    finally:
        is_over.set()
        thread.join()


def find_map(folder: Path) -> UnitMap | None:
    """The map of a run under way, once its fetcher is heard of."""
    for path in folder.glob("trainyard-stream-*/train.map"):
        units = UnitMap(path)
        if units.pid:
            return units
    return None
