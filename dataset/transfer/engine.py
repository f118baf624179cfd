"""The block engine: fetches one file over many connections from several caches, and checks it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from dataset.federation.connection import NETWORK_ERRORS
from dataset.federation.lookup import Lookup
from dataset.federation.pelican import Verdict
from dataset.federation.servers import Fault, Problem, Server, Servers
from dataset.transfer.blocks import Lease
from dataset.transfer.chunk_sums import compute_all
from dataset.transfer.dispatch import Dispatcher
from dataset.transfer.journal import CHUNK
from dataset.transfer.receive import OtherSize, OtherVersion, Receiver, read_problem
from dataset.transfer.store import ChunkStore, DiskError

log = logging.getLogger("trainyard.fetch")

TICK_S = 0.05
SYNC_BYTES = 256 << 20
STOP_S = 0.5  # cut connections are gone long before
BEHIND_NICENESS = 10


class ObjectChanged(Exception):
    """The object at the servers is no longer the one that the partial file holds."""


class OtherSizes(ObjectChanged):
    """No server is left, and at least one reports another size."""


class NoRanges(Exception):
    """No server is left that sends parts of the object; the text is the name of one."""


class Transfer:
    """Fetches what is missing in `store`; `run` returns when all has arrived and is checked.

    One lock (the look-up's) guards blocks, servers and leases. Up to `connections` threads receive,
    sum and write bytes without holding it; the caller's thread supervises.
    """

    def __init__(self, lookup: Lookup, store: ChunkStore) -> None:
        self.lookup, self.options, self.servers = lookup, lookup.options, lookup.servers
        self.store, self.blocks = store, store.blocks
        self.servers.note_all(lookup.target.scheme != "pelican" or lookup.target.directread)
        self._receiver = Receiver(lookup.pool, lookup, self.blocks.size, self._take_in, store.waste)
        self._changed = threading.Condition(lookup.lock)
        self._wake = threading.Event()
        self._dispatcher = Dispatcher(self.blocks, self.servers, self.options)
        self.stays_behind = False  # connections leave the CPU to a hash that follows them
        self.ignores_etags = False  # sums vouch for every chunk: another ETag means nothing
        self._num_threads = 0
        self._stopping = self._syncing = self._rereading = False
        self._error: BaseException | None = None
        self._last_progress = time.monotonic()

    def run(self, on_tick: Callable[[], None] = lambda: None) -> None:
        """Fetches all that is missing; raises when it cannot be had. What arrived is kept."""
        try:
            self._start_rereading()
            while True:
                with self._changed:
                    if self._error is not None:
                        raise self._error
                    if self.blocks.is_complete:
                        break
                    self._supervise(time.monotonic())
                on_tick()
                self._wake.wait(TICK_S)
        finally:
            self._stop()
        if self.store.disk_error is not None:  # of a sync that was running when all had arrived
            raise self.store.disk_error

    @property
    def num_hedges(self) -> int:
        return self._dispatcher.num_hedges

    def allow(self, connections: int) -> None:
        """So many connections from now on."""
        self._dispatcher.allow(connections)

    def leave_out_rangeless(self) -> None:
        """Asks no server that sends only the whole, nor waits for one; raises without another."""
        with self._changed:
            refused = self.servers.refuse_rangeless() if self.blocks.size else []
            for lease in self._dispatcher.out:
                if lease.server in refused:
                    lease.cancel("no ranges")
            if refused and not self.servers.usable:
                raise NoRanges(refused[0].label)

    def fail(self, error: BaseException) -> None:
        """Ends the transfer with an error, from any thread."""
        error = error.error if isinstance(error, DiskError) else error
        with self._changed:
            self._error = self._error or error
        self._wake.set()

    def _stop(self) -> None:
        """Ends all connections; no thread touches the file once this returns."""
        with self._changed:
            self._stopping = True
            for lease in self._dispatcher.out:
                lease.cancel("stopping")
            self._changed.notify_all()
            end = time.monotonic() + STOP_S
            while self._dispatcher.out and time.monotonic() < end:
                self._changed.wait(TICK_S)
            while self.store.num_writing or self._syncing or self._rereading:
                self._changed.wait(TICK_S)

    # What an earlier start left, in a thread beside the connections

    def _start_rereading(self) -> None:
        if self.store.claimed:
            self._rereading = True
            threading.Thread(target=self._reread, name="reread", daemon=True).start()

    def _reread(self) -> None:
        buffer = memoryview(bytearray(CHUNK))
        try:
            for chunk in self.store.claimed:
                if self._stopping:
                    return
                self.store.settle_claim(chunk, buffer)
                with self._changed:
                    self._last_progress = time.monotonic()
            self.store.end_claims()
        except BaseException as error:
            self.fail(error)
        finally:
            with self._changed:
                self._rereading = False
                self._changed.notify_all()
                if self.blocks.is_complete:
                    self._wake.set()

    # The supervisor, under the lock

    def _supervise(self, now: float) -> None:
        if self._dispatcher.watch(now):
            self._changed.notify_all()
        self._start_threads()
        usable, needs_company = self.servers.usable, self._dispatcher.needs_company
        is_stuck = needs_company or all(server.failures for server in usable)
        if is_stuck and self.lookup.is_due(now):
            threading.Thread(target=self._look_up, args=(needs_company,), daemon=True).start()
        if not usable and _has_other_size(self.servers):
            raise OtherSizes(self.lookup.describe_problems())
        self.lookup.check_patience(now, self._last_progress)
        if self.store.unsynced_bytes >= SYNC_BYTES and not self._syncing:
            self._syncing, self.store.unsynced_bytes = True, 0
            threading.Thread(target=self._sync, daemon=True).start()

    def _start_threads(self) -> None:
        """One thread per connection, and one more for every connection that fell silent."""
        while self._num_threads < self._dispatcher.connections + self._dispatcher.num_silent:
            self._num_threads += 1
            threading.Thread(target=self._work, name="fetch", daemon=True).start()

    def _look_up(self, with_origin: bool) -> None:
        self.lookup.refresh(with_origin)
        with self._changed:
            if with_origin and self.lookup.answer.verdict is not Verdict.PASSING:
                self.servers.note_all()

    def _sync(self) -> None:
        try:
            self.store.sync()
        except DiskError as error:
            self.fail(error)
        finally:
            with self._changed:
                self._syncing = False

    # A connection, one thread each

    def _work(self) -> None:
        if self.stays_behind:
            lower_priority()
        buffer = memoryview(bytearray(CHUNK))
        try:
            while True:
                lease = self._next_lease()
                if lease is None:
                    return
                self._serve(lease, buffer)
        except BaseException as error:
            self.fail(error)
        finally:
            with self._changed:
                self._num_threads -= 1

    def _next_lease(self) -> Lease | None:
        """Waits for something to fetch; None when there is nothing more for this thread."""
        with self._changed:
            while not self._stopping and not self.blocks.is_complete:
                num_busy = len(self._dispatcher.out) - self._dispatcher.num_silent
                if num_busy >= self._dispatcher.connections:
                    return None  # a silent connection delivers again: this thread is one too many
                lease = self._dispatcher.dispatch(time.monotonic())
                if lease is not None:
                    return lease
                self._changed.wait(TICK_S)
            return None

    def _serve(self, lease: Lease, buffer: memoryview) -> None:
        """Receives a lease and records the result."""
        server, problem = lease.server, None
        assert server is not None
        try:
            self._receiver.receive(lease, buffer)
        except OtherSize as error:
            server.refuse(Fault.OTHER_SIZE, f"({error})")
            problem = Problem(str(server.refused))
        except OtherVersion as error:
            if not self.ignores_etags:
                raise ObjectChanged(f"{server.label}: {error}") from None
            server.forget_etag()
            problem = Problem(str(error))
        except NETWORK_ERRORS as error:
            if getattr(error, "filename", None) is not None:
                raise  # a local file, not the network
            problem = read_problem(error)
        with self._changed:
            self._settle(lease, server, problem or Problem("ended early"))
            self._changed.notify_all()

    def _settle(self, lease: Lease, server: Server, problem: Problem) -> None:
        now = time.monotonic()
        self._dispatcher.out.discard(lease)
        server.end(now - lease.started)
        server.count_bytes(lease.received)
        if lease.cancelled == "lost":
            self.store.waste.hedged += lease.lost_bytes(lease.beaten_by)
            return
        has_successor = lease.rival is not None and not lease.rival.cancelled
        self.store.waste.in_flight += lease.lost_bytes(lease.rival if has_successor else None)
        if self._stopping:
            return
        if lease.position >= lease.end:
            self.servers.delivered(server, (lease.end - lease.first) * CHUNK, now - lease.started)
            return
        self.blocks.give_back(lease)
        if not lease.cancelled:
            self.lookup.tell(server.label, problem.text)
            has_delivered = lease.position > lease.first
            self.servers.failed(server, now, problem, has_delivered)
        if problem.is_denied:
            self.lookup.reread_token()

    def _take_in(self, lease: Lease, view: memoryview, seconds: float) -> None:
        """Stores one received chunk, and ends the race with a rival."""
        assert lease.server is not None
        values = compute_all(self.store.sums.kinds, view)

        def end_race() -> None:
            if self._stopping:
                raise InterruptedError("stopping")
            loser = self.blocks.settle_rivals(lease)
            if loser is not None:
                loser.cancel("lost")

        known = lease.known
        helper = lease.donor.server if known and lease.donor is not None else None
        is_new = self.store.write(lease.position, lease.server, view, values, end_race, helper)
        with self._changed:
            lease.server.count_bytes(-known)  # those came over the rival's connection
            lease.end_chunk()
            if is_new:
                self.blocks.record_chunk_time(seconds)
                self._last_progress = time.monotonic()
            else:
                self.store.waste.hedged += len(view) - known
            if self.blocks.is_complete:
                self._wake.set()
                self._changed.notify_all()


def _has_other_size(servers: Servers) -> bool:
    refusals = [server.refused for server in servers.all if server.refused is not None]
    return any(refusal.fault is Fault.OTHER_SIZE for refusal in refusals)


def lower_priority() -> None:
    """Leaves the CPU to the other threads of this process."""
    niceness = min(19, os.getpriority(os.PRIO_PROCESS, 0) + BEHIND_NICENESS)
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
