"""Digests of the whole object during the transfer: hashes what arrives, asks for the server's."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from dataset import checksum
from dataset.fetch.size import Digest, ask_digest
from dataset.transfer.chunk_sums import PrefixHash
from dataset.transfer.engine import ObjectChanged, Transfer
from dataset.transfer.journal import CHUNK, Progress
from dataset.transfer.store import ChunkStore

POLL_S = 0.01
LATE_SHARE = 0.5  # to compute a digest a server reads the whole object: not while we start
WAIT_S = 30.0
DIGEST_BYTES_PER_S = 100e6  # XRootD computed 0.4-0.6 GB/s; a busy origin is slower


def pick_kinds(given: Mapping[str, str]) -> tuple[str, ...]:
    """The kinds of checksum of every chunk: one for the journal, and those combined for the whole.

    With the crc32c package that one is enough: it is fast, in the index, and offered by servers.
    """
    base = ["crc32c"] if checksum.HAS_CRC32C else ["crc32", "adler32"]
    return tuple(base + [k for k in given if k in checksum.COMBINABLE and k not in base])


class HashFollower:
    """Hashes the contiguous prefix of the file in a thread of its own while the rest arrives."""

    def __init__(self, store: ChunkStore, kinds: Sequence[str]) -> None:
        self._store = store
        self._hash = PrefixHash(store.fd, kinds, store.blocks.size) if kinds else None
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._follow, daemon=True)
        if kinds:
            self._thread.start()

    def _follow(self) -> None:
        assert self._hash is not None
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

    def __init__(self, transfer: Transfer, progress: Progress) -> None:
        self._transfer = transfer
        known = progress.digests.items()
        self._known = {kind: value for kind, value in known if checksum.can_compute(kind)}
        self._found: Digest | None = None
        self._changed: ObjectChanged | None = None
        self._timeout_s = WAIT_S + progress.size / DIGEST_BYTES_PER_S
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
            found = Digest(kind, self._known[kind], "an earlier start", is_origin=False)
        if found is None:
            return
        kind, value, where, is_origin = found
        if self._known.get(kind, value) != value:
            if is_origin:
                self._changed = ObjectChanged(f"its {kind} at {where} is another one")
                self._transfer.fail(self._changed)
                return
            found = Digest(kind, self._known[kind], "an earlier start", is_origin)
        self._found = found
        try:
            with self._transfer.lookup.lock:
                self._transfer.store.journal.add_digest(found.kind, found.value)
        except OSError as error:
            self._transfer.fail(error)

    def wait(self) -> Digest | None:
        """The digest, once all bytes have arrived."""
        if not self._is_started:
            self._start()
        self._thread.join(self._timeout_s)
        if self._changed is not None:  # the last byte may have come before this answer
            raise self._changed
        return self._found
