"""The chunks of an object from front to back, but what its readers wait for first.

For readers whose order nobody knows ahead. They mark in the map of arrivals what they wait for.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable

import numpy as np

from dataset.stream.arrivals import ArrivalMap
from dataset.transfer.blocks import MISSING, BlockMap, Lease

_AT_ONCE = -1  # the rank of what somebody waits for


class AskedMap(BlockMap):
    """The chunks of an object, those that were asked for first."""

    is_front_to_back = False

    def __init__(
        self, size: int, arrived: Iterable[int], claimed: Iterable[int], marks: ArrivalMap
    ) -> None:
        self._asked = marks.asked
        self._here = marks.here.copy()
        self._pulled = np.zeros(len(marks.asked), bool)  # what has its place in the queue
        super().__init__(size, arrived, claimed, marks)

    def rank(self, lease: Lease) -> int:
        return _AT_ONCE if self.is_urgent(lease) else lease.position

    def is_urgent(self, lease: Lease) -> bool:
        return bool(self._asked[lease.position : lease.end].any())

    def order_claims(self, claimed: Iterable[int]) -> list[int]:
        """What was asked for first; but what readers use already, marked earlier, last."""
        chunks = np.fromiter(claimed, np.int64)
        keys = (chunks, 1 - self._asked[chunks], self._here[chunks])
        in_order: list[int] = chunks[np.lexsort(keys)].tolist()
        return in_order

    def peek(self) -> Lease | None:
        self._pull_asked()
        return super().peek()

    def _pull_asked(self) -> None:
        """Cuts what was asked for since the last look out of the runs that wait."""
        new = (self._asked > 0) & ~self._pulled
        if not new.any():
            return
        self._pulled |= new
        new &= np.frombuffer(self.state, np.uint8) == MISSING
        waiting, self._queue = self._queue, []
        for entry in waiting:
            lease = entry[2]
            # A rival takes over all of a run or nothing.
            if lease.rival is not None or not new[lease.first : lease.end].any():
                heapq.heappush(self._queue, entry)
                continue
            cuts = np.flatnonzero(np.diff(self._asked[lease.first : lease.end].astype(np.int8)))
            bounds = [lease.first, *(lease.first + 1 + cuts).tolist(), lease.end]
            for first, end in itertools.pairwise(bounds):
                self.put(Lease(first, end, lease.avoid))
