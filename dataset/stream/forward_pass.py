"""One pass over an object from its start to its end: transferred, hashed, walked and saved."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dataset import checksum
from dataset.archive.index import check_kind
from dataset.archive.stream_walk import StreamWalk
from dataset.archive.tar_header import BLOCK
from dataset.archive.tar_images import read_kind
from dataset.archive.unit_sums import PrefixSums
from dataset.errors import DataError, UserError
from dataset.federation.lookup import Lookup
from dataset.fetch.digests import DigestAsker, ServerDigest
from dataset.fetch.verify import whole_checksum
from dataset.known_archives import WrongDigest, find_published
from dataset.stream.pass_state import PassState, read_state, write_state
from dataset.stream.resumable_md5 import Md5, continue_md5, start_md5
from dataset.stream.window import WINDOW_CHUNKS, TransferEnded, WindowReader, WindowStore
from dataset.transfer.engine import NoRanges, ObjectChanged, Transfer
from dataset.transfer.journal import CHUNK, Arrivals

log = logging.getLogger("trainyard.index")

SAVE_S = 30.0  # how much of a pass a kill may cost; the state of ImageNet's has 60 MB


class ForwardPass:
    """A pass over one object; `result` is the file that it is for, beside which it is saved."""

    def __init__(self, lookup: Lookup, result: Path, size: int, walk: StreamWalk) -> None:
        self._lookup, self._result, self._size, self._walk = lookup, result, size, walk
        self._published = find_published(lookup.target.name, size)
        self._md5: Md5 | None = start_md5() if self._published else None
        self.prefix = PrefixSums()  # for the sums of the units
        first, kinds = 0, _pick_kinds()
        found = read_state(result, lookup.target.identity)
        if found is not None and self._can_continue(found[0]):
            state, arrays = found
            first, kinds = state.chunk, state.kinds
            walk.unpack(arrays)
            self.prefix.unpack(arrays)
            self._md5 = continue_md5(bytes.fromhex(state.md5)) if self._published else None
            log.info("an earlier start has read %d MiB", first)
            if self.is_md5_lost:
                log.info("its MD5 cannot be continued: that needs libcrypto in both starts")
        self._arrivals = Arrivals(lookup.target.identity, size, kinds, "")
        self._store = WindowStore(self._arrivals, lookup, first, WINDOW_CHUNKS)
        if found is not None and first:
            for chunk, values in enumerate(found[1]["sums"].tolist()):
                self._store.sums.set(chunk, values)
        self._transfer = Transfer(lookup, self._store)
        self._transfer.stays_behind = self._md5 is not None
        self._reader = WindowReader(self._store, first, self._take)
        self._thread = threading.Thread(target=self._read, name="read", daemon=True)
        self._digest: ServerDigest | None = None
        self._error: BaseException | None = None
        self._saved_at = time.monotonic()

    def _can_continue(self, state: PassState) -> bool:
        """Whether a state is of this object; raises if the object changed since."""
        for server in self._lookup.servers.all:
            known = state.etags.get(server.label)
            if known is not None and server.etag is not None and known != server.etag:
                raise ObjectChanged(f"{server.label}: its ETag was {known} and is {server.etag}")
            server.note_etag(known)
        if state.size != self._size:
            raise ObjectChanged(f"it had {state.size} bytes and has {self._size}")
        return all(map(checksum.can_compute, state.kinds))

    def run(self, on_tick: Callable[[Transfer], None]) -> None:
        """Reads to the end. Whatever ends it earlier, what was reached is saved."""
        asker = DigestAsker(self._transfer, self._arrivals) if self._md5 is None else None

        def tick() -> None:
            self._refuse_rangeless()
            if asker is not None:
                asker.start_when_late()
            on_tick(self._transfer)

        self._refuse_rangeless()
        self._thread.start()
        try:
            self._transfer.run(tick)
            on_tick(self._transfer)
            self._thread.join()
            if self._error is not None:  # met behind the last byte that had to come
                raise self._error
        except DataError:  # what was reached is not to be trusted
            raise
        except BaseException:
            self._end_reading()
            self._save()
            raise
        finally:
            self._end_reading()
            self._store.close()
        self._save()  # a digest that is long in coming, or labels that are missing, cost no pass
        self._digest = asker.wait() if asker is not None else None

    def _end_reading(self) -> None:
        self._reader.stop()
        self._thread.join()

    def _refuse_rangeless(self) -> None:
        """Leaves out servers that only send the whole; raises when no other is left."""
        try:
            self._transfer.leave_out_rangeless()
        except NoRanges as label:
            raise UserError(
                f"{label} sends only the whole of {self._lookup.target.name}, no parts of it; "
                "fetch it with scripts/fetch_osdf.py and index the file"
            ) from None

    # In the thread of the reader

    def _read(self) -> None:
        try:
            if not self._walk.first_header:
                head, name = self._pread(BLOCK, 0), Path(self._lookup.target.name)
                check_kind(read_kind(head, name), name)
                self._walk.first_header = head
            self._walk.run(self._pread, self._save_in_time)
            self._reader.finish()
        except TransferEnded:
            pass
        except BaseException as error:
            self._error = error
            self._transfer.fail(error)

    def _pread(self, length: int, offset: int) -> bytes:
        """Reads on; where a header is, a unit may begin."""
        if length == BLOCK and self._reader.pread(1, offset):
            chunk = self._reader.chunk
            self.prefix.mark(self._store.view(chunk), chunk * CHUNK, offset)
        return self._reader.pread(length, offset)

    def _take(self, view: memoryview) -> None:
        self.prefix.take(view, self._reader.chunk * CHUNK)
        if self._md5 is not None:
            self._md5.update(view)

    def _save_in_time(self) -> None:
        if time.monotonic() - self._saved_at >= SAVE_S:
            self._save()

    def _save(self) -> None:
        """Saves what was reached, between two entries or when the reader has ended."""
        chunk = self._reader.chunk
        if not self._walk.first_header or min(chunk * CHUNK, self._size) > self._walk.position:
            return  # stopped inside a long entry: the state saved before counts
        servers = self._lookup.servers.all
        state = PassState(
            self._lookup.target.identity,
            self._size,
            chunk,
            self._store.sums.kinds,
            self._md5.state.hex() if self._md5 is not None else "",
            {server.label: server.etag for server in servers if server.etag is not None},
        )
        arrays = self._walk.pack() | self.prefix.pack()
        write_state(self._result, state, self._sums(chunk), arrays)
        self._saved_at = time.monotonic()

    # After the last byte

    @property
    def is_md5_lost(self) -> bool:
        """Whether a published MD5 cannot be compared, as an earlier start's was not continued."""
        return self._published is not None and self._md5 is None

    def sums_of(self, kind: str) -> npt.NDArray[np.uint32]:
        """The sums of all chunks."""
        column = self._store.sums.kinds.index(kind)
        return np.ascontiguousarray(self._sums(self._store.blocks.num_chunks)[:, column])

    def _sums(self, end: int) -> npt.NDArray[np.uint32]:
        kinds = self._store.sums.kinds
        values = [self._store.sums.get(chunk) for chunk in range(end)]
        return np.array(values, np.uint32).reshape(end, len(kinds))

    def verify(self) -> str:
        """What vouches for the bytes, or an empty string; raises if they are wrong."""
        name = self._lookup.target.identity
        if self._md5 is not None and self._published is not None:
            found, wanted, where = self._md5.hexdigest(), self._published.md5, "published"
            kind = "md5"
        elif self._digest is not None and self._digest.kind in self._store.sums.kinds:
            kind, wanted, where, _ = self._digest
            found = whole_checksum(self._store, kind)
        else:
            return ""
        if found != wanted:
            raise WrongDigest(
                f"{name} has the {kind} {found}, not {wanted} ({where}); no index was written. "
                "Run the same command again to read it anew"
            )
        return f"{kind} ({where})"


def _pick_kinds() -> tuple[str, ...]:
    """Of every chunk: what the index holds, and what servers offer of the whole."""
    return tuple(kind for kind in ("crc32", "adler32", "crc32c") if checksum.can_compute(kind))
