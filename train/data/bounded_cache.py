"""A run whose disk holds only a part of its tar: the limit divided, and a plan for each epoch.

The first rank writes the plans: those of this epoch and the next at the start, later ones as the
run comes to the epoch before. The fetcher follows them (dataset/stream/unit_fetch.py).
"""

from __future__ import annotations

import logging
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dataset.archive.index_file import TarIndex, cut_as_summed
from dataset.errors import UserError
from dataset.own_names import part_path, units_path
from dataset.stream.spec import NEVER, CacheSpec, StreamSpec
from dataset.stream.unit_map import UnitMap
from dataset.stream.unit_plan import EpochPlan, write_plan
from train.data.network_meter import NetworkMeter
from train.data.unit_needs import CacheShare, RunSteps, UnitNeeds, share_cache
from train.data.unit_source import UnitSource

log = logging.getLogger("trainyard")

SPARE_BYTES = 16 << 20  # for what the file system itself needs


class ValTar(Protocol):
    """The validation tar, as a stream plans it."""

    @property
    def path(self) -> Path: ...
    @property
    def size(self) -> int: ...


def open_units(index: TarIndex, place: Path, meter: NetworkMeter) -> UnitSource:
    """The images of the tar, as its units come and go."""
    return UnitSource(index, UnitMap(place), units_path(index.tar), meter)


def lower_to_disk(limit: int, tar: Path, val: Path | None) -> int:
    """The limit, or what the disk has room for if that is less."""
    held = [*units_path(tar).glob("*"), *([val, part_path(val)] if val else [])]
    # A part that is still coming has its whole length, but not yet the bytes.
    found = [file.stat() for file in held if file.exists()]
    room = sum(min(one.st_size, 512 * one.st_blocks) for one in found)
    room += shutil.disk_usage(tar.parent).free - SPARE_BYTES
    return min(limit, room)


def divide_limit(limit: int, val: int, needs: UnitNeeds, connections: int) -> CacheShare:
    """How a limit is divided, if there is one; raises for an order that a limit is not for."""
    if limit and needs.run.order.layout is None:
        raise UserError(
            "--cache-limit takes --order streamed: a uniform order uses all of the tar at any time "
            "(a checkpoint keeps its order; without --cache-limit it can be continued)"
        )
    plans = [needs.plan(number) for number in range(min(2, needs.num_epochs))]
    is_part = needs.run.slots is not None
    return share_cache(limit, val, needs.units, plans, connections, is_part)


def check_limit(share: CacheShare, is_given: bool) -> None:
    """Raises for a limit, or a disk if that is not to blame, that is too small for the order."""
    if share.limit < share.least:
        least = f"{_round_up(share.least)} GB"
        what, fix = "--cache-limit", f"give {least.replace(' ', '')} or more"
        if not is_given:
            missing = _round_up(share.least - share.limit)
            what, fix = "room on the disk", f"free {missing} GB more, for {least} in all"
        raise UserError(
            f"{what}: {share.limit / 1e9:.3f} GB are too little for this order, which has "
            f"up to {share.in_use / 1e9:.3f} GB in use, {share.in_flight / 1e9:.3f} GB on their "
            f"way, and {share.val / 1e9:.3f} GB of validation; {fix}"
        )


def _round_up(num_bytes: int) -> str:
    """Bytes in GB, by MB."""
    return f"{math.ceil(num_bytes / 1e6) / 1e3:.3f}"


def open_cache(
    limit: int, train: UnitSource, val: ValTar | None, steps: RunSteps, folder: Path
) -> BoundedCache:
    """The cache of a run; its plans go into the folder. A limit of 0: as much as the disk holds."""
    needs = UnitNeeds(steps, cut_as_summed(train.index))
    share = divide_limit(limit, val.size if val else 0, needs, StreamSpec.connections)
    room = lower_to_disk(share.limit, train.index.tar, val.path if val else None)
    if room < (limit or share.least + share.used):
        log.warning("the disk has room for %.2f GB only", room / 1e9)
    share = replace(share, limit=room)
    check_limit(share, is_given=0 < limit < share.least)
    cache = BoundedCache(share, needs, train, folder, is_limited=bool(limit or share.later))
    if cache.is_limited:
        cache.tell_start()
    return cache


class BoundedCache:
    """The cache of a run, as its first rank sees it."""

    def __init__(
        self,
        share: CacheShare,
        needs: UnitNeeds,
        source: UnitSource,
        plans: Path,
        *,
        is_limited: bool = True,  # False: all that this node uses is kept
    ) -> None:
        self.is_limited = is_limited
        self.share, self._needs, self._source, self._folder = share, needs, source, plans
        self._plans: list[EpochPlan] = []
        self._write_until(2)

    def make_spec(self, num_ranks: int) -> CacheSpec:
        """What the fetcher is told."""
        share = self.share
        folder = units_path(self._source.index.tar)
        limit, plans = share.limit - share.val, str(self._folder)
        # Also if all fits: what is beside it is what the training needs, should the disk get full.
        keep = max(0, share.limit - share.least)
        return CacheSpec(str(folder), limit, keep, plans, num_ranks)

    def _write_until(self, end: int) -> None:
        for number in range(len(self._plans), min(end, self._needs.num_epochs)):
            plan = self._needs.plan(number)
            write_plan(self._folder, number, plan)
            self._plans.append(plan)

    def note_step(self, step: int) -> None:
        """Writes the plan of the epoch after the one that the run has come to."""
        self._write_until(step // self._needs.per_epoch - self._needs.first_epoch + 2)

    def describe_ahead(self, step: int) -> str:
        """For the progress line: for how many steps all is here."""
        missing, now = self._source.arrivals.here == 0, step - self._needs.run.step
        firsts = [
            np.maximum(plan.first, now)[missing & (plan.last >= now)].min(initial=NEVER)
            for plan in self._plans[-2:]
        ]
        ahead = min(firsts, default=NEVER)
        return ", all steps here" if ahead == NEVER else f", {max(0, int(ahead) - now)} steps ahead"

    def tell_start(self) -> None:
        """One line: the limit, what is kept, and what later epochs fetch."""
        share = self.share
        log.info(
            "cache limit %.2f GB: %.2f GB in use at a time, %.0f %% of %s kept for good; each "
            "later epoch fetches %.2f GB",
            share.limit / 1e9,
            (share.in_use + share.in_flight) / 1e9,
            100 * min(share.keep, share.used) / max(1, share.used),
            "the tar" if share.used == share.total else "its share of the tar",
            share.later / 1e9,
        )

    def describe(self) -> dict[str, Any]:
        """For the record of this attempt."""
        tally, share = self._source.arrivals.tally, self.share
        limit = {
            "cache_limit": share.limit,
            "cache_least": share.least,
            "cache_kept": min(share.keep, share.used),
        }
        costs = {"bytes_refetched": tally.refetched, "bytes_replaced": tally.replaced}
        return (limit if self.is_limited else {}) | costs
