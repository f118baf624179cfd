"""The chunks of an object in the order in which a training needs them.

A request is a run of neighbours that are needed at about the same step: one unit, as a rule. Only
the next few hundred runs are in the queue of what to fetch, so no lock is held for long.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dataset.federation.servers import Server
from dataset.stream.arrivals import ArrivalMap
from dataset.stream.spec import NEVER, Needs
from dataset.transfer.blocks import BLOCK_CHUNKS, DONE, MAX_BLOCK_CHUNKS, MISSING, BlockMap, Lease

HORIZON = 500  # runs in the queue
ALIKE = 8  # neighbours that differ by an eighth of the steps until then are fetched together
URGENT_STEPS = 1  # beyond the first step that lacks something


class NeedMap(BlockMap):
    """The chunks of an object, queued by the step that first uses each."""

    is_front_to_back = False

    def __init__(
        self,
        size: int,
        arrived: Iterable[int],
        claimed: Iterable[int],
        needs: Needs,
        marks: ArrivalMap | None = None,
    ) -> None:
        self._needs: list[int] = needs.tolist()
        self.least_need = min(self._needs, default=NEVER)
        self._here = marks.here.copy() if marks is not None else np.zeros(len(needs), np.uint8)
        in_order = np.argsort(needs, kind="stable")
        self._places = np.empty(len(needs), np.int64)  # of each chunk in the order of need
        self._places[in_order] = np.arange(len(needs))
        self._in_order: list[int] = in_order.tolist()
        self._num_first = 0  # so many chunks of that order are done, without a gap
        self._runs = _cut_runs(needs)
        self._next_run = 0
        super().__init__(size, arrived, claimed, marks)
        is_missing = np.frombuffer(self.state, np.uint8) == MISSING
        self._begin_need = int(needs[is_missing].min(initial=NEVER))  # of this start

    @property
    def first_need(self) -> int:
        """The first step that lacks something; NEVER when no step does."""
        if self._num_first == len(self._in_order):
            return NEVER
        return self._needs[self._in_order[self._num_first]]

    def rank(self, lease: Lease) -> int:
        return min(self._needs[lease.position : lease.end], default=NEVER)

    def is_urgent(self, lease: Lease) -> bool:
        first = self.first_need
        return first < NEVER and self.rank(lease) <= first + URGENT_STEPS

    def is_early(self, lease: Lease) -> bool:
        return self.rank(lease) > self._near_need

    @property
    def _near_need(self) -> int:
        """The last step whose chunks may share the link with those of the first that lacks some.

        At the start that is the first one alone: on a slow link 32 connections would bring many
        times what it needs before it is complete. Each step that is complete adds another, so the
        requests under way double until all connections are busy, which a long link needs.
        """
        first = max(self.first_need, self._begin_need)
        return min(NEVER, 2 * first - self._begin_need)

    def block_chunks(self, rate: float, connections: int) -> int:
        """One chunk where longer requests would leave connections without any of a near step."""
        wanted, last = BLOCK_CHUNKS * connections, self._near_need
        next_ones = self._in_order[self._num_first : self._num_first + HORIZON]
        near = [chunk for chunk in next_ones if self._needs[chunk] <= last < NEVER]
        if near and sum(self.state[chunk] == MISSING for chunk in near) < wanted:
            return 1
        return super().block_chunks(rate, connections)

    def order_claims(self, claimed: Iterable[int]) -> list[int]:
        """By need; but what readers use already, since an earlier fetcher marked it, last."""
        chunks = np.fromiter(claimed, np.int64)
        in_order: list[int] = chunks[
            np.lexsort((self._places[chunks], self._here[chunks]))
        ].tolist()
        return in_order

    def _fill_queue(self) -> None:
        """The first of the runs, whenever there is room for more in the queue."""
        firsts, ends, needs = self._runs
        while self._next_run < len(firsts) and (
            len(self._queue) < HORIZON or needs[self._next_run] < self._queue[0][0]
        ):
            first, end = firsts[self._next_run], ends[self._next_run]
            self._next_run += 1
            if MISSING in self.state[first:end]:
                self.put(Lease(first, end))

    def peek(self) -> Lease | None:
        self._fill_queue()
        while (lease := super().peek()) is None and self._next_run < len(self._runs[0]):
            self._fill_queue()
        return lease

    def mark_done(self, chunk: int) -> None:
        super().mark_done(chunk)
        while self._num_first < self.num_chunks:
            if self.state[self._in_order[self._num_first]] != DONE:
                break
            self._num_first += 1

    def drop(self, first: int, end: int, avoid: frozenset[Server]) -> None:
        for start in range(first, end, BLOCK_CHUNKS):
            super().drop(start, min(end, start + BLOCK_CHUNKS), avoid)
        self._num_first = min(self._num_first, int(self._places[first:end].min()))


def _cut_runs(needs: Needs) -> tuple[list[int], list[int], list[int]]:
    """The first chunk, the end and the need of each run, in the order of need."""
    wide = needs.astype(np.int64)
    is_needed = wide < NEVER
    low, high = np.minimum(wide[1:], wide[:-1]), np.maximum(wide[1:], wide[:-1])
    base = wide.min(initial=NEVER)
    is_border = (high - low > (low - base) // ALIKE) | (is_needed[1:] != is_needed[:-1])
    begins = np.flatnonzero(np.append(True, is_border))
    number = np.arange(len(wide)) - np.repeat(begins, np.diff(np.append(begins, len(wide))))
    longest = np.where(is_needed, BLOCK_CHUNKS, MAX_BLOCK_CHUNKS)
    firsts = np.flatnonzero(number % longest == 0)
    ends = np.append(firsts[1:], len(wide))
    run_needs = np.minimum.reduceat(wide, firsts)
    in_order = np.argsort(run_needs, kind="stable")
    return firsts[in_order].tolist(), ends[in_order].tolist(), run_needs[in_order].tolist()
