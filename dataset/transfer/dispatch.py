"""Who fetches what from where: hands out leases, hedges silent ones, splits slow ones."""

from __future__ import annotations

import logging

from dataset.federation.lookup import Options
from dataset.federation.servers import Server, Servers
from dataset.transfer.blocks import BLOCK_CHUNKS, BlockMap, Lease
from dataset.transfer.journal import CHUNK

log = logging.getLogger("trainyard.fetch")

HEDGE_S = 1.0  # a silent block is not hedged sooner than this
# Used before the first chunk, when the speed is not known: a cache that must ask its origin first
# takes seconds. At most the first few connections are hedged by it, a chunk each.
FIRST_HEDGE_S = 3.0
AVOID_S = 20.0  # how long a block waits for a server other than those that it should avoid
STEAL_S = 1.0  # near the end: a block that takes longer is split with an idle connection
# Beyond this the CPU is the limit and not the network: measured on loopback, 2 or 3 connections
# moved 1.0 GB/s where 8 moved 0.8. A slower network never comes near it and gets all connections.
FULL_BYTES_PER_S = 600e6
MIN_CONNECTIONS = 3
START_CONNECTIONS = 4  # until the first block tells how fast the network is
LATE_S = 2.0  # an urgent lease that trickles is hedged so long after the time that others took


class Dispatcher:
    """The running leases, and the rules for new ones; the caller holds the lock."""

    def __init__(self, blocks: BlockMap, servers: Servers, options: Options) -> None:
        self.out: set[Lease] = set()
        self.num_hedges = 0
        self.needs_company = False  # a block is silent or wrong, and no other server can take it
        self._put_off: list[Lease] = []  # what could not be placed at the last look
        self._blocks, self._servers, self._options = blocks, servers, options
        self.connections, self._num_at_start = options.connections, START_CONNECTIONS

    def allow(self, connections: int) -> None:
        """So many connections from now on, before the speed is known too."""
        self.connections = self._num_at_start = connections

    @property
    def num_silent(self) -> int:
        """Connections that occupy a thread but receive nothing."""
        return sum(lease.stall_counted for lease in self.out)

    def dispatch(self, now: float) -> Lease | None:
        """The next lease for an idle connection; None when it has to wait."""
        if len(self.out) - self.num_silent >= self._wanted_connections():
            return None
        lease = self._take_waiting(now) or self._steal(now)
        if lease is not None:
            self.out.add(lease)
        return lease

    def watch(self, now: float) -> bool:
        """Hedges silent leases at other servers, cuts those that stay silent; True if it did."""
        self.needs_company = any(self._lacks_source(lease, now) for lease in self._put_off)
        silent = [lease for lease in self.out if self._watch_one(lease, now)]
        return bool(silent)

    def _watch_one(self, lease: Lease, now: float) -> bool:
        idle_s = now - lease.progress_at
        server = lease.server
        assert server is not None
        if lease.cancelled:
            return False
        if idle_s >= self._options.stall_s:
            log.info("%s: silent for %.1f s, connection given up", server.label, idle_s)
            self._count_stall(lease, server, now)
            lease.cancel("stalled")
            return True
        is_urgent = self._blocks.is_urgent(lease)
        if lease.rival is not None or not self._is_silent(lease, now, is_urgent):
            return False
        has_other = self._servers.has_other(lease.avoid | {server}, now)
        if has_other and (not is_urgent or self._is_mute(server, now)):
            self._count_stall(lease, server, now)
        elif is_urgent and (has_other or self._servers.are_all):
            lease.note_stall()  # only this connection; another one to the same server may deliver
        else:
            self.needs_company = True
            return False
        self.num_hedges += 1
        self._blocks.hedge(lease)
        return True

    def _is_silent(self, lease: Lease, now: float, is_urgent: bool) -> bool:
        """Whether to hedge it: after 3 x the median time of a block, 1 s at least.

        If it is urgent, that of a chunk counts, and a slow one is not waited for either.
        """
        idle_s, median_s = now - lease.progress_at, self._blocks.median_block_s()
        if median_s is None:
            return idle_s >= FIRST_HEDGE_S
        if not is_urgent:
            return idle_s >= max(HEDGE_S, 3 * median_s)
        chunk_s = median_s / BLOCK_CHUNKS
        late_s = now - lease.started - 4 * chunk_s * (lease.position - lease.first + 1)
        return idle_s >= max(HEDGE_S, 3 * chunk_s) or late_s >= LATE_S

    def _is_mute(self, server: Server, now: float) -> bool:
        """Whether no connection to this server receives anything."""
        return all(now - o.progress_at >= HEDGE_S for o in self.out if o.server is server)

    def _count_stall(self, lease: Lease, server: Server, now: float) -> None:
        if lease.note_stall():
            self._servers.stalled(server, now)

    def _wanted_connections(self) -> int:
        """The number asked for, or fewer on a very fast network; few to begin with."""
        rates = [server.rate for server in self._servers.usable if server.rate]
        if not rates:
            return min(self.connections, self._num_at_start)
        few = int(FULL_BYTES_PER_S * len(rates) / sum(rates))
        return min(self.connections, max(MIN_CONNECTIONS, few))

    def _take_waiting(self, now: float) -> Lease | None:
        """The first waiting lease that there is a server for."""
        if self._servers.pick(now) is None:
            return None  # for no lease at all
        picks: dict[frozenset[Server], Server | None] = {}  # the same for all with the same avoid
        self._put_off = []
        for waiting in self._blocks.iter_waiting():
            if self._blocks.is_early(waiting) and self._is_near_under_way():
                return None  # nor any other: those that are needed sooner come first
            avoid_s = HEDGE_S if self._blocks.is_urgent(waiting) else AVOID_S
            if waiting.put_off_at is not None and now - waiting.put_off_at >= avoid_s:
                waiting.accept_any()
            if waiting.avoid not in picks:
                picks[waiting.avoid] = self._pick(now, waiting.avoid)
            server = picks[waiting.avoid]
            if server is not None:
                return self._take(waiting, server, now)
            waiting.put_off(now)
            self._put_off.append(waiting)
        return None

    def _is_near_under_way(self) -> bool:
        """Whether a connection brings what is needed so soon that it gets the link for itself."""
        is_early = self._blocks.is_early
        return any(not (o.stall_counted or o.cancelled or is_early(o)) for o in self.out)

    def _take(self, waiting: Lease, server: Server, now: float) -> Lease:
        """As much of a waiting lease as the server should get in one request."""
        max_chunks = self._blocks.block_chunks(server.rate, self.connections)
        if server.failures:
            max_chunks = BLOCK_CHUNKS  # on trial
        if not server.has_ranges:
            max_chunks = self._blocks.num_chunks  # all that follows comes in the same answer
        return self._begin(self._blocks.take(max_chunks, waiting), server, now)

    def _pick(self, now: float, avoid: frozenset[Server]) -> Server | None:
        """A server that is not to be avoided; one that is, when there are no others at all."""
        if self._servers.are_all or not avoid.issuperset(self._servers.usable):
            return self._servers.pick(now, avoid)
        return None

    def _lacks_source(self, lease: Lease, now: float) -> bool:
        """Whether a waiting lease needs others than the servers that are known."""
        assert lease.put_off_at is not None
        return now - lease.put_off_at >= HEDGE_S or lease.avoid.issuperset(self._servers.usable)

    def _steal(self, now: float) -> Lease | None:
        """Near the end: half of the rest of a slow lease, for an idle connection."""
        best, best_s = None, (False, STEAL_S)
        for lease in self.out:
            done = (lease.position - lease.first) * CHUNK + lease.partial
            if lease.cancelled or lease.rival is not None or lease.remaining < 2 or not done:
                continue
            left_s = lease.remaining * CHUNK / (done / max(now - lease.started, 1e-3))
            if left_s > STEAL_S and (self._blocks.is_urgent(lease), left_s) > best_s:
                best, best_s = lease, (self._blocks.is_urgent(lease), left_s)
        server = self._servers.pick(now, best.avoid) if best is not None else None
        if best is None or server is None or not server.has_ranges:
            return None
        return self._begin(self._blocks.split(best), server, now)

    def _begin(self, lease: Lease, server: Server, now: float) -> Lease:
        lease.begin(server, now)
        server.begin(now)
        return lease
