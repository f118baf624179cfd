"""Writes chunks to the partial file and its journal, in an order that makes any kill safe."""

from __future__ import annotations

import itertools
import logging
import os
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from dataset.durable import write_at
from dataset.errors import DataError
from dataset.federation.servers import Server, Servers
from dataset.transfer.blocks import ARRIVED, CLAIMED, MISSING, WRITING, BlockMap
from dataset.transfer.chunk_sums import BlockChecks, ChunkSums, compute_all
from dataset.transfer.journal import CHUNK, Arrivals, Journal, chunk_length
from dataset.transfer.resume import read_chunk
from dataset.transfer.waste import Waste

log = logging.getLogger("trainyard.fetch")

MIN_BLOCK_TRIES = 4  # before a block is given up, all servers having sent it wrong
MAX_BLOCK_TRIES = 20  # and in any case: some servers may rest for long

MapMaker = Callable[[int, Iterable[int], Iterable[int]], BlockMap]  # size, arrived, claimed


class DiskError(Exception):
    """Wraps an OSError of the local disk, so that it is not taken for one of the network."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


class ChunkStore:
    """The file being filled. Each chunk is claimed by one writer, written, journalled, marked.

    So every journalled chunk is in the file at any moment, and two connections that race for a
    chunk (a hedge) cannot mix their bytes or combine one's checksum with the other's data.
    """

    def __init__(
        self,
        fd: int,
        journal: Journal,
        arrivals: Arrivals,
        lock: AbstractContextManager[object],
        servers: Servers,
        checks: BlockChecks | None = None,
        say: Callable[[str], None] = log.info,
        make_map: MapMaker = BlockMap,
    ) -> None:
        self.fd, self.journal, self.checks = fd, journal, checks
        self._say, self.part = say, journal.path.with_suffix("")
        self.resumed_bytes = sum(chunk_length(n, arrivals.size) for n in arrivals.chunks)
        self._num_lost = 0  # chunks of an earlier start in whose place are other bytes now
        claimed = () if arrivals.were_read else arrivals.chunks
        arrived = arrivals.chunks if arrivals.were_read else ()
        self.blocks = make_map(arrivals.size, arrived, claimed)
        self.claimed = self.blocks.order_claims(claimed)
        self.sums = ChunkSums(arrivals.kinds, arrivals.size, self.blocks.num_chunks)
        self.waste = Waste()
        self.num_writing = 0
        self.unsynced_bytes = 0
        self.disk_error: OSError | None = None  # the first one
        self._lock, self._servers = lock, servers
        self._names = list(arrivals.sources)
        self._sent_by = array("h", [-1] * self.blocks.num_chunks)
        self._helped: dict[int, str] = {}  # chunk -> another server that sent its first bytes
        self._wrong: dict[int, int] = {}  # index block -> wrong copies of it
        self._wrong_from: dict[int, set[Server]] = {}  # and who sent one alone
        self._earlier = set(arrivals.chunks)  # what was there before this start
        for chunk, (server, values) in arrivals.chunks.items():
            self.sums.set(chunk, values)
            self._sent_by[chunk] = server
        self._check(range(self.blocks.num_chunks))

    def settle_claim(self, chunk: int, buffer: memoryview) -> None:
        """Reads a chunk that a journal lists; marks it as missing unless its bytes are right.

        No digest is ever computed from a journal alone: another process may have changed the
        file since, and a line may be damaged.
        """
        view = buffer[: chunk_length(chunk, self.blocks.size)]
        is_read = read_chunk(self.fd, view, chunk * CHUNK)
        is_right = is_read and compute_all(self.sums.kinds, view) == self.sums.get(chunk)
        with self._lock:
            if self.blocks.state[chunk] != CLAIMED:
                return
            if is_right:
                self.blocks.state[chunk] = ARRIVED
                self._check(range(chunk, chunk + 1))
            else:
                self._num_lost += 1
                self.resumed_bytes -= len(view)
                self._unvouch(chunk, chunk + 1)
                self.blocks.drop(chunk, chunk + 1, frozenset())

    def end_claims(self) -> None:
        """Called when all that an earlier start left has been read."""
        self.claimed = []
        if self._num_lost:
            self._say(
                f"damaged on the disk: {self._num_lost} MiB of an earlier start; fetching it again"
            )

    def sender(self, chunk: int) -> str:
        """The name of the server that a chunk came from."""
        number = self._sent_by[chunk]
        return self._names[number] if 0 <= number < len(self._names) else "an earlier start"

    def is_new(self, chunk: int) -> bool:
        """Whether a chunk that is there was fetched by this start."""
        return chunk not in self._earlier

    def write(
        self,
        chunk: int,
        server: Server,
        view: memoryview,
        values: Sequence[int],
        on_claim: Callable[[], None] = lambda: None,
        helper: Server | None = None,
    ) -> bool:
        """Stores a received chunk; False when another connection was faster.

        `helper` is the server of its first bytes, if that was another one.
        """
        with self._lock:
            if self.blocks.state[chunk] != MISSING:
                server.count_bytes(len(view))
                return False
            on_claim()
            server.count_bytes(len(view))
            self.blocks.state[chunk] = WRITING
            self.num_writing += 1
        try:
            number = self._place(chunk, server, view, values)
        except BaseException:
            with self._lock:
                self.blocks.state[chunk] = MISSING
                self.num_writing -= 1
            raise
        with self._lock:
            self.num_writing -= 1
            self.unsynced_bytes += len(view)
            self.sums.set(chunk, values)
            self._sent_by[chunk] = number
            self._earlier.discard(chunk)
            self._helped.pop(chunk, None)
            if helper is not None:
                self._helped[chunk] = helper.label
            self.blocks.state[chunk] = ARRIVED
            self._check(range(chunk, chunk + 1))
        return True

    def _place(self, chunk: int, server: Server, view: memoryview, values: Sequence[int]) -> int:
        """Puts a chunk into the file and then into the journal; returns its server's number."""
        with self._disk():
            write_at(self.fd, view, chunk * CHUNK)
            number = self._number(server)
            self.journal.add_chunk(chunk, number, values)
        return number

    def replace(self, chunk: int, server: Server, view: memoryview, values: Sequence[int]) -> None:
        """Replaces the bytes of a chunk that turned out wrong."""
        with self._lock:
            self._unvouch(chunk, chunk + 1)
            self.blocks.drop(chunk, chunk + 1, frozenset())
            self.waste.wrong += len(view)
            self.waste.compared -= len(view)
            server.count_bytes(-len(view))  # counted when they were compared
        self.write(chunk, server, view, values)

    def drop_from(self, names: Collection[str]) -> int:
        """Marks all chunks from these senders as missing; returns the number of bytes."""
        num_bytes = end = 0
        with self._lock:
            senders = [{self.sender(n), self._helped.get(n)} for n in range(self.blocks.num_chunks)]
            for is_theirs, run in itertools.groupby(senders, lambda s: not s.isdisjoint(names)):
                first, end = end, end + len(list(run))
                if is_theirs:
                    self._unvouch(first, end)
                    self.blocks.drop(first, end, frozenset())
                    num_bytes += min(end * CHUNK, self.blocks.size) - first * CHUNK
            self.waste.wrong += num_bytes
        return num_bytes

    def sync(self) -> None:
        """Sends what was written to the disk, so that a power cut costs little."""
        with self._disk():
            os.fdatasync(self.fd)
            self.journal.sync()

    def flush(self) -> None:
        """Sends the whole file to the disk, before it gets its final name."""
        with self._disk():
            os.fsync(self.fd)

    @contextmanager
    def _disk(self) -> Iterator[None]:
        """Around every disk access: turns an OSError into a DiskError and doubts the journal."""
        try:
            yield
        except OSError as error:
            self.journal.doubt()
            self.disk_error = self.disk_error or error
            error.filename = error.filename or str(self.part)
            raise DiskError(error) from None

    def _unvouch(self, first: int, end: int) -> None:
        with self._disk():
            self.journal.drop_chunks(first, end)

    def _number(self, server: Server) -> int:
        """A server's number in the journal, where it is named at its first chunk."""
        if server.label not in self._names:
            with self._lock:
                self._name(server)
        return self._names.index(server.label)

    def _name(self, server: Server) -> None:
        if server.label not in self._names:  # not by another thread meanwhile
            self.journal.add_source(server.label)
            if server.etag is not None:
                self.journal.add_etag(server.label, server.etag)
            self._names.append(server.label)

    def _check(self, chunks: range) -> None:
        """Marks arrived chunks as done: at once, or when the checksum of their block is right."""
        if self.checks is None:
            for chunk in chunks:
                if self.blocks.state[chunk] == ARRIVED:
                    self.blocks.mark_done(chunk)
            return
        for block in sorted({self.checks.block_of(chunk) for chunk in chunks}):
            members = self.checks.chunks_of(block, self.blocks.num_chunks)
            if any(self.blocks.state[chunk] != ARRIVED for chunk in members):
                continue
            if self.sums.of_chunks(self.checks.kind, members) == self.checks.values[block]:
                for chunk in members:
                    self.blocks.mark_done(chunk)
            else:
                self._refetch(block, members, self.checks.where)

    def _refetch(self, block: int, members: range, where: str) -> None:
        """Logs and counts a block with wrong bytes, to fetch it again elsewhere."""
        start, end = members.start * CHUNK, min(members.stop * CHUNK, self.blocks.size)
        names = {self.sender(chunk) for chunk in members}
        names |= {self._helped.pop(chunk) for chunk in members if chunk in self._helped}
        guilty = [server for server in self._servers.all if server.label in names]
        text = f"bytes {start}-{end - 1} from {', '.join(sorted(names))}"
        self._wrong[block] = self._wrong.get(block, 0) + 1
        proven = self._wrong_from.setdefault(block, set())
        proven.update(guilty if len(names) == 1 else ())
        if self._is_hopeless(self._wrong[block], proven):
            raise DataError(
                f"{text} differ from {where}, as they did from every source tried before; "
                "is the index for this object? Remove it or make it again"
            )
        self._say(f"{text} are wrong according to {where}; fetching them again elsewhere")
        self.waste.wrong += end - start
        for server in guilty:
            self._servers.sent_wrong_block(server, is_alone=len(names) == 1)
        self._unvouch(members.start, members.stop)
        suspects = proven.union(guilty)
        has_others = not suspects.issuperset(self._servers.usable)
        avoid = frozenset(suspects if has_others else proven)
        self.blocks.drop(members.start, members.stop, avoid)

    def _is_hopeless(self, num_wrong: int, proven: set[Server]) -> bool:
        """Whether every server, including the origin, has sent a wrong copy of a block."""
        all_wrong = self._servers.are_all and proven.issuperset(self._servers.usable)
        return num_wrong >= (MIN_BLOCK_TRIES if all_wrong else MAX_BLOCK_TRIES)
