"""What the units of a bounded cache have cost so far, in bytes, in all starts of the fetcher."""

from __future__ import annotations

from collections.abc import Iterable

from dataset.federation.servers import Server
from dataset.stream.arrivals import ArrivalMap, Tally
from dataset.transfer.waste import Waste


class UnitCosts:
    """Counts for one start of the fetcher, on top of those before it."""

    def __init__(self, arrivals: ArrivalMap) -> None:
        self._arrivals, self._before = arrivals, arrivals.tally
        self.waste = Waste()
        self.resumed = 0  # found on the disk, and right
        self.refetched = 0  # had been freed
        self.replaced = 0  # had been changed or removed on the disk

    def publish(self, servers: Iterable[Server]) -> None:
        """Writes the sums into the map."""
        before = self._before
        earlier = before.twice or {}
        tally = Tally(
            before.fetched + sum(server.bytes for server in servers),
            before.resumed + self.resumed,
            before.refetched + self.refetched,
            before.replaced + self.replaced,
            {cause: num + earlier.get(cause, 0) for cause, num in vars(self.waste).items()},
        )
        self._arrivals.count(tally)
