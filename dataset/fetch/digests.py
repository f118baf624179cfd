"""Digests of the whole object during the transfer: hashes what arrives, asks for the server's."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from dataset import checksum
from dataset.federation.connection import NETWORK_ERRORS, Pool, explain
from dataset.federation.document import ask_rivals, get_document
from dataset.federation.lookup import Lookup
from dataset.federation.pelican import DirectorAnswer, Verdict
from dataset.federation.servers import name_server
from dataset.transfer.chunk_sums import PrefixHash
from dataset.transfer.engine import ObjectChanged, Transfer, lower_priority
from dataset.transfer.journal import CHUNK, Arrivals
from dataset.transfer.store import ChunkStore

log = logging.getLogger("trainyard.fetch")

POLL_S = 0.01
LATE_SHARE = 0.5  # to compute a digest a server reads the whole object: not while we start
WAIT_S = 30.0
RIVAL_SHARE = 0.25  # of the time for a digest
ORIGIN_WAITS_S = (0.2, 1.0, 3.0)
DIGEST_BYTES_PER_S = 100e6  # XRootD computed 0.4-0.6 GB/s; a busy origin is slower


class ServerDigest(NamedTuple):
    """A server's digest of the whole object; a cache's is of its own copy."""

    kind: str
    value: str
    where: str
    is_origin: bool


def pick_kinds(given: Mapping[str, str], block_kind: str | None = None) -> tuple[str, ...]:
    """The kinds of checksum of every chunk: one for the journal, and those combined for the whole.

    With the crc32c package that one is enough: it is fast and offered by servers. `block_kind` is
    that of the index's blocks.
    """
    base = ["crc32c"] if checksum.HAS_CRC32C else ["crc32", "adler32"]
    needed = [*given] if block_kind is None else [*given, block_kind]
    more = [kind for kind in dict.fromkeys(needed) if kind in checksum.COMBINABLE]
    return tuple(base + [kind for kind in more if kind not in base])


class HashFollower:
    """Hashes the contiguous prefix of the file in a thread of its own while the rest arrives."""

    def __init__(self, store: ChunkStore, kinds: Sequence[str]) -> None:
        self._store = store
        self._hash = PrefixHash(store.fd, kinds) if kinds else None
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._follow, daemon=True)
        if kinds:
            self._thread.start()

    def _follow(self) -> None:
        assert self._hash is not None
        if not self._store.blocks.is_front_to_back:  # then nobody waits for it
            lower_priority()
        size = self._store.blocks.size
        try:
            while self._hash.position < size and not self._stop.is_set():
                end = min(self._store.blocks.prefix * CHUNK, size)
                if end > self._hash.position:
                    self._hash.advance(end, self._stop)
                else:
                    self._stop.wait(POLL_S)
        except BaseException as error:
            self._error = error

    def finish(self) -> dict[str, str]:
        """The hashes of the whole file, once all of it is there."""
        if self._hash is None:
            return {}
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._hash.hexdigests()

    def stop(self) -> None:
        """Ends the thread; the file is not read after this."""
        self._stop.set()
        if self._hash is not None:
            self._thread.join()


class DigestAsker:
    """Asks a server for the object's digest, in a thread of its own, when half of it has arrived.

    After a restart it asks at once: if the origin's digest differs from the journalled one, the
    object has changed and the partial file is useless. A cache's may be of a damaged copy.
    """

    def __init__(self, transfer: Transfer, arrivals: Arrivals) -> None:
        self._transfer = transfer
        known = arrivals.digests.items()
        self._known = {kind: value for kind, value in known if checksum.can_compute(kind)}
        self._found: ServerDigest | None = None
        self._changed: ObjectChanged | None = None
        self._timeout_s = WAIT_S + arrivals.size / DIGEST_BYTES_PER_S
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._is_started = False
        if self._known:
            self._start()

    def start_when_late(self) -> None:
        blocks = self._transfer.blocks
        if not self._is_started and blocks.num_done >= LATE_SHARE * blocks.num_chunks:
            self._start()

    def _start(self) -> None:
        self._is_started = True
        self._thread.start()

    def _ask(self) -> None:
        own = [kind for kind in self._transfer.store.sums.kinds if kind != "crc32"]
        kinds = [*own, *(k for k in ("md5", "adler32") if k not in own)]
        found = ask_digest(self._transfer.lookup, kinds, self._timeout_s)
        if found is None and self._known:  # nobody answers now: the journalled digest still counts
            kind = next((k for k in kinds if k in self._known), next(iter(self._known)))
            found = ServerDigest(kind, self._known[kind], "an earlier start", is_origin=False)
        if found is None:
            return
        kind, value, where, is_origin = found
        if self._known.get(kind, value) != value:
            if is_origin:
                self._changed = ObjectChanged(f"its {kind} at {where} is another one")
                self._transfer.fail(self._changed)
                return
            found = ServerDigest(kind, self._known[kind], "an earlier start", is_origin)
        self._found = found
        try:
            with self._transfer.lookup.lock:
                self._transfer.store.journal.add_digest(found.kind, found.value)
        except OSError as error:
            self._transfer.fail(error)

    def wait(self) -> ServerDigest | None:
        """The digest, once all bytes have arrived."""
        if not self._is_started:
            self._start()
        self._thread.join(self._timeout_s)
        if self._changed is not None:  # the last byte may have come before this answer
            raise self._changed
        return self._found


def ask_digest(lookup: Lookup, kinds: list[str], timeout_s: float) -> ServerDigest | None:
    """The first digest of the whole object that a server gives.

    The origin is asked first: a cache's digest is that of its own copy, which may be damaged.
    XRootD reads the whole file for it, seconds for each GB; a cache may answer 405 and close. If
    a server stays silent for part of the time, the next one is asked as well.
    """
    with Pool(timeout_s, lookup.reach) as pool:
        origin = _find_origin(lookup)
        token = origin.namespace.require_token
        places = [(url, token) for url in origin.sources]
        with lookup.lock:
            places += [(s.url, s.wants_token) for s in lookup.servers.usable]

        def ask(url: str, wants_token: bool) -> ServerDigest | None:
            for kind in kinds:
                found = _ask_one(pool, lookup, url, wants_token, kind)
                if found is not None:
                    return ServerDigest(kind, found, name_server(url), url in origin.sources)
            return None

        named = {url: token for url, token in places if url.startswith("http")}
        questions = [partial(ask, *place) for place in named.items()]
        return ask_rivals(questions, RIVAL_SHARE * timeout_s, timeout_s)


def _find_origin(lookup: Lookup) -> DirectorAnswer:
    """The origin's address; a failed look-up is repeated, so that the digest is not missed."""
    for wait_s in ORIGIN_WAITS_S:
        answer = lookup.ask(directread=True)
        if answer.verdict is not Verdict.PASSING:
            return answer
        time.sleep(wait_s)
    return lookup.ask(directread=True)


def _ask_one(pool: Pool, lookup: Lookup, url: str, wants_token: bool, kind: str) -> str | None:
    # XRootD repeats the Digest of an earlier request on a kept connection: a new one each time.
    headers = {"Want-Digest": kind, "Connection": "close", **lookup.headers(url, wants_token)}
    try:
        status, found, _, _ = get_document(pool, url, headers, method="HEAD")
    except NETWORK_ERRORS as error:
        log.debug("no %s from %s: %s", kind, name_server(url), explain(error))
        return None
    if status != 200 or "digest" not in found:
        return None
    digest = checksum.parse_digest_header(found["digest"]).get(kind)
    if digest is None:
        log.warning("%s sent a Digest that is no %s; not used", name_server(url), kind)
    return digest
