"""Many small files at once, one request each; files that fail so get a full transfer."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dataset.durable import write_at
from dataset.federation.connection import NETWORK_ERRORS, Connection
from dataset.federation.document import RIVAL_S, Watch, fill, watching
from dataset.federation.framing import ProtocolError
from dataset.federation.lookup import Lookup
from dataset.federation.servers import Server
from dataset.federation.webdav import Entry
from dataset.fetch.ledger import Ledger
from dataset.fetch.size import ask_size
from dataset.fetch.small_digests import SmallDigests, address_beside, names_by_path
from dataset.fetch.verify import refuse_unverified
from dataset.own_names import part_path
from dataset.transfer.own_files import check_absent, hold_part
from dataset.transfer.receive import check_answer, open_range, read_problem
from dataset.transfer.store import DiskError

log = logging.getLogger("trainyard.fetch")

SMALL_BYTES = 4 << 20  # one block: nothing to resume
MAX_TRIES = 3
WAIT_S = 0.05


@dataclass(eq=False)
class Try:
    """One request for a file; if it is silent, another server is asked as well."""

    entry: Entry
    path: Path
    number: int = 0
    avoid: frozenset[Server] = frozenset()
    progress_at: float = 0.0
    has_all: bool = False
    rival: Try | None = None
    is_lost: bool = False  # the rival has the file
    connection: Connection | None = None


class SmallFiles:
    """Fetches a list of (entry, local path); `failed` holds those that need a full transfer."""

    def __init__(
        self,
        lookup: Lookup,
        known_path: str,
        files: Sequence[tuple[Entry, Path]],
        ledger: Ledger,
        on_bytes: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        self.failed: list[tuple[Entry, Path]] = []
        self.num_verified = self.num_bytes = self.num_hedges = 0
        self._lookup = lookup
        self._known_path = known_path  # the object that the look-up's servers were named for
        self._queue = deque(Try(entry, path) for entry, path in files)
        self._open: dict[Try, Server] = {}
        self._num_left = len(self._queue)
        self._num_writing = 0
        self._on_bytes = on_bytes
        self._ledger = ledger
        self._changed = threading.Condition(lookup.lock)
        self._error: BaseException | None = None
        self._is_over = False
        self._last_progress = time.monotonic()
        self._digests = SmallDigests(lookup, known_path)

    def run(self) -> None:
        """Fetches all files with as many threads as there may be connections."""
        with self._ledger.hold_open(), self._changed:
            for _ in range(min(self._lookup.options.connections, len(self._queue))):
                self._start_thread()
            while self._num_left and self._error is None:
                self._hedge(time.monotonic())
                self._changed.wait(WAIT_S)
            self._is_over = True
            for rival in self._open:
                _cut(rival)
            while self._num_writing:
                self._changed.wait(WAIT_S)
        self._digests.close()
        if self._error is not None:
            raise self._error

    def _start_thread(self) -> None:
        threading.Thread(target=self._work, daemon=True).start()

    def _hedge(self, now: float) -> None:
        """Asks another server for files whose server is silent, on a thread of their own."""
        for one, server in list(self._open.items()):
            is_silent = not one.has_all and now - one.progress_at >= RIVAL_S
            if is_silent and one.rival is None and self._lookup.servers.has_other({server}, now):
                one.rival = Try(one.entry, one.path, one.number, one.avoid | {server}, rival=one)
                self._queue.appendleft(one.rival)
                self._lookup.servers.stalled(server, now)
                self.num_hedges += 1
                self._start_thread()

    def _work(self) -> None:
        try:
            while (one := self._take()) is not None:
                server = self._open.get(one)
                if server is None:
                    self._wait(one)
                else:
                    self._fetch(one, server)
        except DiskError as error:
            self._error = error.error
        except BaseException as error:
            self._error = error

    def _take(self) -> Try | None:
        """The next file with a server for it, if one is free; None when all is over."""
        with self._changed:
            while not self._queue and not self._is_over:
                self._changed.wait(WAIT_S)
            if self._is_over or self._error is not None:
                return None
            one, now = self._queue.popleft(), time.monotonic()
            server = None if one.is_lost else self._lookup.servers.pick(now, one.avoid)
            if server is not None:
                server.begin(now)
                one.progress_at = now
                self._open[one] = server
            return one

    def _wait(self, one: Try) -> None:
        """When every server rests: puts the file back, and looks for other servers."""
        now = time.monotonic()
        with self._changed:
            if one.is_lost:
                return
            self._queue.appendleft(one)
            self._lookup.check_patience(now, self._last_progress)
        if self._lookup.is_due(now):
            self._lookup.refresh()
        time.sleep(WAIT_S)

    def _fetch(self, one: Try, server: Server) -> None:
        problem, began, is_kept = None, time.monotonic(), False
        try:
            data = self._get(one, server)
            one.has_all = True
            verified = self._digests.verify(one.entry, data)
            if self._lookup.options.require_digest:
                refuse_unverified(one.entry.path, verified)
            if self._claim(one):
                self._keep(one.entry, one.path, data, verified)
                is_kept = True
        except NETWORK_ERRORS as error:
            problem = read_problem(error)
        with self._changed:
            now, size = time.monotonic(), one.entry.size or 0
            del self._open[one]
            server.end(now - began)
            if is_kept:
                server.count_bytes(size)
                self._lookup.servers.delivered(server, size, now - began)
                self._settle()
            elif problem is not None and not one.is_lost:
                log.debug("%s: %s", one.entry.path, problem.text)
                self._lookup.servers.failed(server, now, problem)
                self._retry(one)

    def _claim(self, one: Try) -> bool:
        """Whether this try may write the file; after a True its rival may not."""
        with self._changed:
            if one.is_lost or self._is_over:
                return False
            if one.rival is not None:
                one.rival.is_lost = True
                _cut(one.rival)
            self._num_writing += 1
            return True

    def _settle(self) -> None:
        self._num_left -= 1
        if not self._num_left:
            self._changed.notify_all()

    def _retry(self, one: Try) -> None:
        """Queues a file again unless its rival is running; after some tries it is `failed`."""
        if one.rival is not None:
            one.rival.rival = None
        elif one.number + 1 >= MAX_TRIES:
            self.failed.append((one.entry, one.path))
            self._settle()
        else:
            self._queue.append(Try(one.entry, one.path, one.number + 1))
            self._changed.notify()

    def _get(self, one: Try, server: Server) -> bytearray:
        entry, url = one.entry, address_beside(server.url, self._known_path, one.entry)
        if not names_by_path(server.url, self._known_path):
            raise ProtocolError("it does not name objects by their paths")
        place = Server(url, server.label, server.wants_token)
        if not entry.size:  # a listing that says 0 makes no empty file by itself
            if ask_size(self._lookup, place) != 0:
                raise ProtocolError("has bytes where the listing says 0")
            return bytearray()
        with watching(self._lookup.options.stall_s) as watch:
            return self._receive(one, place, entry.size, watch)

    def _receive(self, one: Try, place: Server, size: int, watch: Watch) -> bytearray:
        def hold(connection: Connection) -> None:
            watch.hold(connection)
            with self._changed:
                one.connection = connection
                if one.is_lost:
                    connection.cut()

        def note_progress() -> None:
            watch.note_progress()
            one.progress_at = time.monotonic()

        keep = False
        try:
            answer = open_range(self._lookup.pool, self._lookup, place, 0, size, hold)
            check_answer(answer, 0, size, size, place)
            data = bytearray(size)
            fill(answer.readinto, memoryview(data), note_progress)
            keep = answer.release(size)
        finally:
            watch.let_go()
            with self._changed:
                connection, one.connection = one.connection, None
            if connection is not None and keep and not watch.has_cut:
                self._lookup.pool.give(connection)
            elif connection is not None:
                connection.close()
        return data

    def _keep(self, entry: Entry, path: Path, data: bytearray, verified: list[str]) -> None:
        """Writes the file whole; its record, and then its final name."""
        part = part_path(path)
        try:
            fd = hold_part(part)
            try:
                os.ftruncate(fd, 0)
                write_at(fd, memoryview(data), 0)
                identity = self._lookup.target.child(entry.path).identity
                check_absent(path)
                self._ledger.add_before_rename(path, identity, verified, {})
                part.replace(path)
            finally:
                os.close(fd)
        except OSError as error:
            raise DiskError(error) from None
        finally:
            with self._changed:
                self._num_writing -= 1
        with self._changed:
            self.num_verified += bool(verified)
            self.num_bytes += len(data)
            self._last_progress = time.monotonic()
            self._on_bytes(len(data))  # under the lock: a bar is not made for threads


def _cut(one: Try) -> None:
    if one.connection is not None:
        one.connection.cut()
