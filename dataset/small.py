"""Many small files at once: one request each; what resists that goes the long way."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from dataset import checksum
from dataset.acceptance import refuse_unverified
from dataset.connection import NETWORK_ERRORS, Connection, Pool, explain
from dataset.document import get_document
from dataset.folder import Ledger
from dataset.framing import ProtocolError
from dataset.lookup import Lookup
from dataset.own_names import part_path
from dataset.probe import ask_size
from dataset.receive import PROGRESS_BYTES, StatusError, check_answer, open_range
from dataset.sources import Source, name_server
from dataset.store import DiskError
from dataset.webdav import Entry

log = logging.getLogger("trainyard.fetch")

SMALL_BYTES = 4 << 20  # one block: nothing to resume
MAX_TRIES = 3
MAX_SILENT_DIGESTS = 3
WAIT_S = 0.05


class SmallFiles:
    """Fetches a list of (entry, local path); `failed` holds those that need the long way."""

    def __init__(
        self,
        lookup: Lookup,
        known_path: str,
        files: Sequence[tuple[Entry, Path]],
        ledger: Ledger,
        on_bytes: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        self.failed: list[tuple[Entry, Path]] = []
        self.num_verified = 0
        self.num_bytes = 0
        self._lookup = lookup
        self._known_path = known_path  # the object that the look-up's sources were named for
        self._queue = deque((entry, path, 0) for entry, path in files)
        self._on_bytes = on_bytes
        self._ledger = ledger
        self._lock = lookup.lock
        self._error: BaseException | None = None
        self._last_progress = time.monotonic()
        self._silent_digests = 0
        self._digest_place: tuple[str, bool] | None = None

    def run(self) -> None:
        """Fetches all files with as many threads as there may be connections."""
        origin = self._lookup.ask(directread=True)
        if origin.sources and origin.sources[0].startswith("http"):
            self._digest_place = (origin.sources[0], origin.namespace.require_token)
        threads = [
            threading.Thread(target=self._work, daemon=True)
            for _ in range(min(self._lookup.options.connections, len(self._queue)))
        ]
        with self._ledger.hold_open():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            while self._error is None:
                with self._lock:
                    if not self._queue:
                        return
                    entry, path, tries = self._queue.popleft()
                    source = self._lookup.sources.pick(time.monotonic())
                    if source is not None:
                        source.active += 1
                if source is None:
                    self._wait(entry, path, tries)
                else:
                    self._fetch(entry, path, tries, source)
        except DiskError as error:
            self._error = error.error
        except BaseException as error:
            self._error = error

    def _wait(self, entry: Entry, path: Path, tries: int) -> None:
        """Every source rests: the file goes back, and a look-up may find others."""
        now = time.monotonic()
        with self._lock:
            self._queue.appendleft((entry, path, tries))
            self._lookup.check_patience(now, self._last_progress)
        if self._lookup.is_due(now):
            self._lookup.refresh()
        time.sleep(WAIT_S)

    def _fetch(self, entry: Entry, path: Path, tries: int, source: Source) -> None:
        problem = ""
        began = time.monotonic()
        try:
            data = self._get(entry, source)
            verified = self._verify(entry, data)
            if self._lookup.options.require_digest:
                refuse_unverified(entry.path, verified)
            self._keep(entry, path, data, verified)
        except StatusError as error:
            problem = str(error.status)
        except NETWORK_ERRORS as error:
            problem = explain(error)
        with self._lock:
            source.active -= 1
            source.seconds += time.monotonic() - began
            if problem:
                self._lookup.sources.failed(source, time.monotonic(), problem)
            else:
                source.bytes += entry.size or 0
                self._lookup.sources.delivered(source, entry.size or 0, time.monotonic() - began)
        if problem:
            log.debug("%s: %s", entry.path, problem)
            self._retry(entry, path, tries + 1)

    def _retry(self, entry: Entry, path: Path, tries: int) -> None:
        with self._lock:
            if tries >= MAX_TRIES:
                self.failed.append((entry, path))
            else:
                self._queue.append((entry, path, tries))

    def _at(self, url: str, entry: Entry) -> str:
        """The address of an entry beside that of the known object on the same server."""
        parts = urlsplit(url)
        path, known = unquote(parts.path), unquote(self._known_path)  # a server may spell it anew
        prefix = quote(path[: len(path) - len(known)])
        return parts._replace(path=prefix + entry.path).geturl()

    def _get(self, entry: Entry, source: Source) -> bytearray:
        place = Source(self._at(source.url, entry), source.label, source.wants_token)
        size = entry.size or 0
        if not size:  # a listing that says 0 makes no empty file by itself
            if ask_size(self._lookup, place) != 0:
                raise ProtocolError("has bytes where the listing says 0")
            return bytearray()
        held: list[Connection] = []
        keep = False
        try:
            answer = open_range(self._lookup.pool, self._lookup, place, 0, size, held.append)
            check_answer(answer, 0, size, size, place)
            data = bytearray(size)
            self._read(answer.readinto, memoryview(data))
            keep = answer.release(size)
        finally:
            if held and keep:
                self._lookup.pool.give(held[-1])
            elif held:
                held[-1].close()
        return data

    def _read(self, readinto: Callable[[memoryview], int], view: memoryview) -> None:
        """Fills the view; a drip ends like a stall."""
        stall_s = self._lookup.options.stall_s
        filled = counted = 0
        progress_at = time.monotonic()
        while filled < len(view):
            got = readinto(view[filled:])
            if not got:
                raise ProtocolError("ended early")
            filled += got
            if filled - counted >= PROGRESS_BYTES:
                counted, progress_at = filled, time.monotonic()
            if time.monotonic() - progress_at > stall_s:
                raise ProtocolError("stalled")

    def _verify(self, entry: Entry, data: bytearray) -> list[str]:
        """Compares with the origin's digest while it offers any; wrong bytes are an error."""
        if self._digest_place is None or self._silent_digests >= MAX_SILENT_DIGESTS:
            return []
        kind = "crc32c" if checksum.HAS_CRC32C else "adler32"
        url, wants_token = self._at(self._digest_place[0], entry), self._digest_place[1]
        headers = {"Want-Digest": kind, **self._lookup.headers(url, wants_token)}
        found = checksum.to_hex(kind, checksum.compute(kind, data))
        digest = self._ask_digest(self._lookup.pool, url, headers, kind)
        if digest is not None and digest != found:
            digest = self._ask_again(url, headers, kind)
        if digest is None:
            self._silent_digests += 1
            if self._silent_digests == MAX_SILENT_DIGESTS:
                log.info("%s tells no digests; files are taken without", name_server(url))
            return []
        self._silent_digests = 0
        if digest != found:
            raise ProtocolError("wrong bytes")
        return [f"{kind} ({name_server(url)})"]

    def _ask_again(self, url: str, headers: Mapping[str, str], kind: str) -> str | None:
        """On a new connection: XRootD may repeat the Digest of an earlier request on a kept one."""
        pool = Pool(self._lookup.pool.timeout_s, self._lookup.reach)
        try:
            return self._ask_digest(pool, url, headers, kind)
        finally:
            pool.close()

    def _ask_digest(
        self, pool: Pool, url: str, headers: Mapping[str, str], kind: str
    ) -> str | None:
        """The origin's digest; that it cannot be had is no fault of whoever sent the bytes."""
        try:
            status, found, _, _ = get_document(pool, url, headers, "HEAD")
        except NETWORK_ERRORS as error:
            log.debug("no digest from %s: %s", name_server(url), explain(error))
            return None
        digest = checksum.parse_digest_header(found.get("digest", "")).get(kind)
        return digest if status == 200 else None

    def _keep(self, entry: Entry, path: Path, data: bytearray, verified: list[str]) -> None:
        """Writes the file whole; its record, and then its final name."""
        part = part_path(path)
        try:
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
            finally:
                os.close(fd)
            identity = self._lookup.target.child(entry.path).identity
            self._ledger.add_before_rename(path, identity, verified, {})
            part.replace(path)
        except OSError as error:
            raise DiskError(error) from None
        with self._lock:
            self.num_verified += bool(verified)
            self.num_bytes += len(data)
            self._last_progress = time.monotonic()
            self._on_bytes(len(data))  # under the lock: a bar is not made for threads
