"""Brings the units of a tar into a bounded cache, by need: each as its own range, verified.

Servers, look-ups and connections are those of a fetch (dataset/federation). The lock of the look-up
guards cache and servers. Threads receive, check and write without it; the caller's supervises.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Callable

import numpy as np

from dataset.archive.unit_sums import Uint32s
from dataset.errors import DataError, UserError
from dataset.federation.connection import NETWORK_ERRORS
from dataset.federation.lookup import Lookup
from dataset.federation.pelican import Verdict
from dataset.federation.servers import Fault, Problem, Server
from dataset.stream.unit_cache import UnitCache
from dataset.stream.unit_costs import UnitCosts
from dataset.stream.unit_request import UnitRequest
from dataset.transfer.receive import OtherSize, OtherVersion, read_problem

log = logging.getLogger("trainyard.fetch")

TICK_S = 0.05
# A unit that a reader waits for is asked of a second server after a second without data, or if it
# is very slow. On a busy link each of 32 connections takes a second for a unit: none is at fault.
HEDGE_S, SLOW_S = 1.0, 4.0
STUCK_S = 2.0  # no step was made for so long, and a reader waits
MAX_TRIES = 8  # of a unit that comes wrong
MIN_TRIES = 4  # if every server has sent it wrong
WRONG = Problem("wrong bytes")

Prove = Callable[[int, bytearray | bytes], None]  # raises if the tar contradicts the index


class UnitFetch:
    """The transfer of a bounded cache; `run` ends by an error, or with its process."""

    def __init__(
        self, lookup: Lookup, cache: UnitCache, sums: Uint32s, prove: Prove, num_ranks: int
    ) -> None:
        self.cache, self._lookup, self._servers = cache, lookup, lookup.servers
        self._map, self._sums, self._prove, self._num_ranks = cache.map, sums, prove, num_ranks
        self._changed = threading.Condition(lookup.lock)
        self._out: set[UnitRequest] = set()
        self._is_busy = np.zeros(len(sums), bool)  # on its way, or being verified
        self._is_lost = np.zeros(len(sums), bool)  # was here, and was changed or removed
        self._wrong_from: dict[int, list[Server]] = {}
        self._needs_origin = False
        self._error: BaseException | None = None
        self._costs = UnitCosts(self._map)
        self._last_progress = self._last_step = time.monotonic()
        self._servers.note_all(lookup.target.scheme != "pelican" or lookup.target.directread)

    def run(self, on_tick: Callable[[], None]) -> None:
        """Follows the plan; raises when something cannot be had."""
        for _ in range(2 * self._lookup.options.connections):
            threading.Thread(target=self._work, name="fetch", daemon=True).start()
        try:
            while True:
                with self._changed:
                    if self._error is not None:
                        raise self._error
                    self._supervise(time.monotonic())
                    self._changed.notify()  # whoever finds work wakes the next one
                on_tick()
                time.sleep(TICK_S)
        finally:
            self.fail(InterruptedError("stopping"))
            self._costs.publish(self._servers.all)

    def fail(self, error: BaseException) -> None:
        """Ends all, from any thread."""
        with self._changed:
            self._error = self._error or error
            for request in self._out:
                request.cut()
            self._changed.notify_all()

    # The supervisor, under the lock

    def _supervise(self, now: float) -> None:
        step = int(self._map.cursors[: self._num_ranks, 0].min())
        if step != self.cache.uses.step:
            self._last_step = now
        if self.cache.uses.follow(step):
            self.cache.settle()
        is_stuck = now - self._last_step >= STUCK_S
        for unit in np.flatnonzero(self._map.asked).tolist():
            self._is_lost[unit] |= self.cache.check_asked(unit, is_stuck)
        self._watch_servers(now)
        self._refuse_small_limit()
        self._costs.publish(self._servers.all)

    def _watch_servers(self, now: float) -> None:
        servers, lookup = self._servers, self._lookup
        if servers.refuse_rangeless() and not servers.usable:
            raise UserError(f"{lookup.target.identity} is sent whole, and a part was asked for")
        usable = servers.usable
        if not usable and any(
            s.refused and s.refused.fault is Fault.OTHER_SIZE for s in servers.all
        ):
            raise DataError(f"{lookup.target.identity} has another size now; make its index again")
        is_stuck = self._needs_origin or all(server.failures for server in usable)
        if is_stuck and lookup.is_due(now):
            threading.Thread(target=self._look_up, args=(self._needs_origin,), daemon=True).start()
        if not self._out:
            missing = self.cache.find_missing(self._is_busy)
            if missing is None or not self.cache.take_place(missing):
                self._last_progress = now  # nothing is to come
            elif not self.cache.is_found[missing]:
                self.cache.give_up_place(missing)
        lookup.check_patience(now, self._last_progress)

    def _look_up(self, with_origin: bool) -> None:
        self._lookup.refresh(with_origin)
        with self._changed:
            if with_origin and self._lookup.answer.verdict is not Verdict.PASSING:
                self._servers.note_all()
                self._needs_origin = False

    def _refuse_small_limit(self) -> None:
        """Raises if a unit of the step under way has no place and nothing can make one."""
        unit = self.cache.find_missing(self._is_busy)
        if unit is None or self._is_busy.any() or not self._map.asked[unit]:
            return
        if self.cache.uses.values[unit] <= self.cache.uses.step:
            if not self.cache.take_place(unit):
                raise self.cache.refuse_small(unit)
            if not self.cache.is_found[unit]:
                self.cache.give_up_place(unit)

    # A connection, one thread each

    def _work(self) -> None:
        try:
            while (request := self._next()) is not None:
                if request.server is None:
                    self._verify_found(request.unit)
                else:
                    self._serve(request, request.server)
        except BaseException as error:
            self.fail(error)

    def _next(self) -> UnitRequest | None:
        """Waits for something to bring or to verify; None at the end."""
        with self._changed:
            while self._error is None:
                request = self._choose(time.monotonic())
                if request is not None:
                    self._changed.notify()
                    return request
                self._changed.wait()
            return None

    def _choose(self, now: float) -> UnitRequest | None:
        connections = self._lookup.options.connections
        most = 2 * connections if self._map.num_waiting else connections
        if len(self._out) >= most:
            return None
        if (hedge := self._choose_hedge(now)) is not None:
            avoid = [hedge.server] if hedge.server is not None else []
            return self._begin(hedge.unit, self._servers.pick(now, avoid), now)
        unit = self.cache.find_missing(self._is_busy)
        if unit is None:
            return None
        if self.cache.is_found[unit]:
            self._is_busy[unit] = True
            return UnitRequest(unit, None, now)
        server = self._servers.pick(now, self._wrong_from.get(unit, ()))
        has_place = server is not None and self.cache.take_place(unit)
        return self._begin(unit, server, now) if has_place else None

    def _choose_hedge(self, now: float) -> UnitRequest | None:
        """A request that a reader has waited for too long, and that no other races with."""
        units = [request.unit for request in self._out]
        for request in self._out:
            is_late = now - request.last_data >= HEDGE_S or now - request.started >= SLOW_S
            is_late = is_late and bool(self._map.asked[request.unit])
            if is_late and units.count(request.unit) == 1 and not request.is_cut:
                return request
        return None

    def _begin(self, unit: int, server: Server | None, now: float) -> UnitRequest | None:
        if server is None:
            return None
        server.begin(now)
        request = UnitRequest(unit, server, now)
        self._out.add(request)
        self._is_busy[unit] = True
        return request

    def _verify_found(self, unit: int) -> None:
        """Takes a file that an earlier start left, or that was touched, if its bytes are right."""
        data = self.cache.read_found(unit, int(self._sums[unit]))
        if data is not None:
            self._prove(unit, data)
        with self._changed:
            self._is_busy[unit] = False
            if not self.cache.is_found[unit]:
                return  # freed meanwhile
            if data is None:
                self._is_lost[unit] |= bool(self._map.seen[unit])
                self.cache.free(unit)
                return
            self._costs.resumed += 0 if self._map.seen[unit] else len(data)
            self._is_lost[unit] = self.cache.is_found[unit] = False
            self._map.mark_written(unit, self.cache.stat_time(unit))

    def _serve(self, request: UnitRequest, server: Server) -> None:
        """Receives one unit and records the result."""
        data, problem = bytearray(self._map.length(request.unit)), None
        try:
            request.receive(self._lookup, self._map, memoryview(data))
            if zlib.crc32(data) != self._sums[request.unit]:
                problem = WRONG
        except OtherSize as error:
            server.refuse(Fault.OTHER_SIZE, f"({error})")
            problem = Problem(str(server.refused))
        except OtherVersion as error:  # the sums vouch for every unit
            server.forget_etag()
            problem = Problem(str(error))
        except NETWORK_ERRORS as error:
            if getattr(error, "filename", None) is not None:
                raise  # a local file, not the network
            problem = read_problem(error)
        with self._changed:
            self._settle(request, server, problem)
            is_first = problem is None and not self._map.here[request.unit] and not request.is_cut
            if is_first:  # the others for this unit lose, before it is written
                for other in self._out:
                    if other.unit == request.unit:
                        other.cut()
        if is_first:
            self._take_in(request.unit, data)

    def _settle(self, request: UnitRequest, server: Server, problem: Problem | None) -> None:
        now, unit = time.monotonic(), request.unit
        self._out.discard(request)
        server.end(now - request.started)
        server.count_bytes(request.received)
        if request.is_cut or (problem is None and self._map.here[unit]):
            self._costs.waste.hedged += request.received
        elif problem is None:
            self._last_progress = now
            self._servers.delivered(server, request.received, now - request.started)
            return
        elif problem is WRONG:
            self._note_wrong(unit, server)
        else:
            self._costs.waste.in_flight += request.received
            self._lookup.tell(server.label, problem.text)
            self._servers.failed(server, now, problem)
            if problem.is_denied:
                self._lookup.reread_token()
        if not request.is_cut and all(other.unit != unit for other in self._out):
            self._is_busy[unit] = False
            self.cache.give_up_place(unit)

    def _note_wrong(self, unit: int, server: Server) -> None:
        """Counts wrong bytes; raises when every server sends them."""
        begin, end = int(self._map.bounds[unit]), int(self._map.bounds[unit + 1])
        text = f"bytes {begin}-{end - 1} of {self._lookup.target.identity}"
        log.warning("%s from %s are wrong; fetching them again", text, server.label)
        self._costs.waste.wrong += end - begin
        self._servers.sent_wrong_block(server)
        wrong = self._wrong_from.setdefault(unit, [])
        wrong.append(server)
        are_all = set(wrong).issuperset(self._servers.usable)
        self._needs_origin |= are_all and not self._servers.are_all
        if len(wrong) >= (MIN_TRIES if are_all and self._servers.are_all else MAX_TRIES):
            raise DataError(f"{text} are wrong by the index at every server; is the index its own?")

    def _take_in(self, unit: int, data: bytearray) -> None:
        """Writes a verified unit, and tells the readers."""
        self._prove(unit, data)
        try:
            written_ns = self.cache.write(unit, data)
        except OSError as error:
            with self._changed:
                self._is_busy[unit] = False
                self.cache.give_up_place(unit)
                self.cache.lower_limit(error)
            return
        with self._changed:
            self._is_busy[unit] = False
            if self._is_lost[unit]:
                self._costs.replaced += len(data)
            elif self._map.seen[unit]:
                self._costs.refetched += len(data)
            self._is_lost[unit] = False
            self._wrong_from.pop(unit, None)
            self._map.mark_written(unit, written_ns)
