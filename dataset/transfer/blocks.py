"""Which chunks of a file are missing, being fetched or done: the bookkeeping of a transfer.

The fields of a lease are written in this file alone.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dataset.federation.connection import Connection
from dataset.federation.servers import Server
from dataset.transfer.journal import CHUNK, Marks, chunk_length, num_chunks

BLOCK_CHUNKS = 4  # requests are whole multiples of 4 MiB
MAX_BLOCK_CHUNKS = 64
BLOCK_S = 2.0  # about how long one request should take: much longer than a WAN round trip
# CLAIMED: in the file according to an earlier start's journal, but not yet read again.
# ARRIVED: in the file, but the checksum of its index block is not yet known.
MISSING, CLAIMED, WRITING, ARRIVED, DONE = range(5)


@dataclass(eq=False)
class Lease:
    """A run of chunks that one connection fetches from one server."""

    first: int
    end: int
    avoid: frozenset[Server] = frozenset()
    put_off_at: float | None = None  # when it could first not be placed because of `avoid`
    server: Server | None = None
    position: int = 0  # the chunk that is being received
    partial: int = 0  # bytes of it so far, in `buffer`
    buffer: memoryview | None = None
    prefix: bytes = b""  # the first bytes of the first chunk, taken over from a silent rival
    donor: Lease | None = None  # whose they were
    donated: int = 0  # bytes of the chunk at `position` that a rival took over
    beaten_by: Lease | None = None
    started: float = 0.0
    progress_at: float = 0.0
    connection: Connection | None = None
    cancelled: str = ""
    rival: Lease | None = None  # another lease on the same chunks: the first to finish one wins
    stall_counted: bool = False

    def __post_init__(self) -> None:
        self.position = self.first

    @property
    def remaining(self) -> int:
        return self.end - self.position

    @property
    def known(self) -> int:
        """Bytes of the chunk at `position` taken over from a rival, not received itself."""
        return len(self.prefix) if self.position == self.first else 0

    @property
    def received(self) -> int:
        """Bytes of the chunk at `position` that came over this lease's own connection."""
        return max(0, self.partial - self.known)

    def lost_bytes(self, successor: Lease | None) -> int:
        """Bytes that are lost when this lease ends here and `successor` continues."""
        if successor is not None and successor is self.donor:
            return self.received
        donated = self.donated if successor is not None else 0
        return self.known + self.received - donated

    def put_off(self, now: float) -> None:
        """No server can take it now; the first time counts."""
        self.put_off_at = now if self.put_off_at is None else self.put_off_at

    def accept_any(self) -> None:
        """A suspect server is better than none."""
        self.avoid = frozenset()

    def begin(self, server: Server, now: float) -> None:
        """A server was found for it."""
        self.server, self.started, self.progress_at = server, now, now

    def receive_into(self, buffer: memoryview) -> None:
        """Its chunks will be filled in this buffer, one after the other."""
        self.buffer = buffer

    def hold(self, connection: Connection) -> None:
        """It is received over this connection, which `cancel` cuts."""
        self.connection = connection
        if self.cancelled:
            connection.cut()

    def let_go(self) -> Connection | None:
        """The connection, which `cancel` cannot cut any more."""
        connection, self.connection = self.connection, None
        return connection

    def start_chunk(self, view: memoryview) -> int:
        """Puts what was taken over from a rival into the view; returns how many bytes it were."""
        view[: self.known] = self.prefix[: self.known]
        self.partial = self.known
        return self.known

    def note_progress(self, now: float) -> None:
        self.progress_at = now

    def note_partial(self, num_bytes: int) -> None:
        """So many bytes of the chunk at `position` are in the buffer."""
        self.partial = num_bytes

    def end_chunk(self) -> None:
        """The chunk at `position` is stored."""
        self.partial = self.donated = 0
        self.position += 1

    def note_stall(self) -> bool:
        """It is silent; True the first time."""
        is_first, self.stall_counted = not self.stall_counted, True
        return is_first

    def cancel(self, reason: str) -> None:
        """Ends the lease from outside, while a thread receives it."""
        self.cancelled = self.cancelled or reason
        if self.connection is not None:
            self.connection.cut()


class BlockMap:
    """The states of all chunks and the queue of what to fetch; the caller holds the lock."""

    is_front_to_back = True

    def __init__(
        self,
        size: int,
        arrived: Iterable[int] = (),
        claimed: Iterable[int] = (),
        marks: Marks | None = None,
    ) -> None:
        self.size, self._marks = size, marks
        self.num_chunks = num_chunks(size)
        self.state = bytearray(self.num_chunks)
        for chunk in arrived:
            self.state[chunk] = ARRIVED
        for chunk in claimed:
            self.state[chunk] = CLAIMED
        self.num_done = 0
        self.prefix = 0  # all chunks before this one are DONE
        self._queue: list[tuple[int, int, Lease]] = []
        self._order = itertools.count()
        self._chunk_times: deque[float] = deque(maxlen=64)
        self._fill_queue()

    def _fill_queue(self) -> None:
        for run in re.finditer(rb"%c+" % MISSING, self.state):
            self.put(Lease(*run.span()))

    @property
    def is_complete(self) -> bool:
        return self.num_done == self.num_chunks

    def rank(self, lease: Lease) -> int:
        """The lower, the sooner it is fetched."""
        return lease.first

    def order_claims(self, claimed: Iterable[int]) -> list[int]:
        """In which order to read again what an earlier start left."""
        return sorted(claimed)

    def is_urgent(self, lease: Lease) -> bool:
        """Whether somebody waits, or soon will, for the chunk that it is at."""
        return False

    def is_early(self, lease: Lease) -> bool:
        """Whether it should not share the link with what is needed sooner."""
        return False

    def put(self, lease: Lease) -> None:
        heapq.heappush(self._queue, (self.rank(lease), next(self._order), lease))

    def peek(self) -> Lease | None:
        """The next run to fetch, as a rule from the front of the file: hashing can follow."""
        while self._queue:
            lease = self._queue[0][2]
            if self._trim(lease):
                return lease
            heapq.heappop(self._queue)
        return None

    def iter_waiting(self) -> Iterator[Lease]:
        """The runs to fetch, from the front of the file; as a rule the first one is taken."""
        head = self.peek()
        if head is None:
            return
        yield head
        for _, _, lease in sorted(self._queue):
            if lease is not head and self._trim(lease):
                yield lease

    def _trim(self, lease: Lease) -> bool:
        """Cuts chunks off a waiting lease up to the first that is missing; False if none is."""
        while lease.first < lease.end and self.state[lease.first] != MISSING:
            lease.first, lease.prefix = lease.first + 1, b""
        lease.position = lease.first
        return lease.first < lease.end and not lease.cancelled

    def take(self, max_chunks: int, found: Lease | None = None) -> Lease:
        """A waiting run, cut to max_chunks (whole 4 MiB) and before done chunks."""
        lease = found or self._queue[0][2]
        if lease is self._queue[0][2]:
            heapq.heappop(self._queue)
        else:
            self._queue = [entry for entry in self._queue if entry[2] is not lease]
            heapq.heapify(self._queue)
        if lease.rival is not None:
            max_chunks = lease.end - lease.first  # a rival takes over all or nothing
        end = min(lease.end, lease.first + max_chunks)
        if end < lease.end:
            end = max(end - end % BLOCK_CHUNKS, lease.first + 1)
        end = next((c for c in range(lease.first, end) if self.state[c] != MISSING), end)
        if end < lease.end:
            self.put(Lease(end, lease.end, lease.avoid))
            lease.end = end
        return lease

    def give_back(self, lease: Lease) -> None:
        """Queues the unfinished chunks of a broken lease, unless its rival fetches them."""
        rival, lease.rival = lease.rival, None
        if rival is not None:
            rival.rival = None
            if not rival.cancelled:
                return
        if lease.position < lease.end:
            self.put(Lease(lease.position, lease.end, lease.avoid))

    def hedge(self, lease: Lease) -> None:
        """Queues a rival for a silent lease: the first to finish a chunk continues alone.

        The rival takes over the bytes that the silent one has, so that little is fetched twice.
        """
        assert lease.server is not None
        rival = Lease(lease.position, lease.end, lease.avoid | {lease.server}, rival=lease)
        if lease.buffer is not None and lease.partial < chunk_length(lease.position, self.size):
            rival.prefix, rival.donor = bytes(lease.buffer[: lease.partial]), lease
            lease.donated = lease.partial
        lease.rival = rival
        self.put(rival)

    def settle_rivals(self, winner: Lease) -> Lease | None:
        """The lease that lost to `winner`, to be cancelled; None without a rival."""
        loser, winner.rival = winner.rival, None
        if loser is not None:
            loser.rival, loser.beaten_by = None, winner
        return loser

    def split(self, victim: Lease) -> Lease:
        """Splits off the second half of a running lease as a lease of its own."""
        middle = victim.position + (victim.remaining + 1) // 2
        half = Lease(middle, victim.end, victim.avoid)
        victim.end = middle
        return half

    def mark_done(self, chunk: int) -> None:
        self.state[chunk] = DONE
        self.num_done += 1
        if self._marks is not None:
            self._marks.mark(chunk)
        while self.prefix < self.num_chunks and self.state[self.prefix] == DONE:
            self.prefix += 1

    def drop(self, first: int, end: int, avoid: frozenset[Server]) -> None:
        """Marks chunks that turned out wrong as missing."""
        if self._marks is not None:
            self._marks.unmark(first, end)
        for chunk in range(first, end):
            self.num_done -= self.state[chunk] == DONE
            self.state[chunk] = MISSING
        self.prefix = min(self.prefix, first)
        self.put(Lease(first, end, avoid))

    def record_chunk_time(self, seconds: float) -> None:
        self._chunk_times.append(seconds)

    def median_block_s(self) -> float | None:
        """The recent median time of a 4 MiB block; None before the first chunk."""
        if not self._chunk_times:
            return None
        return sorted(self._chunk_times)[len(self._chunk_times) // 2] * BLOCK_CHUNKS

    def block_chunks(self, rate: float, connections: int) -> int:
        """How many chunks to ask for at once: long requests, but work for every connection."""
        wanted = int(rate * BLOCK_S) // CHUNK
        share = self.state.count(MISSING) // (2 * connections)
        chunks = max(BLOCK_CHUNKS, min(wanted, share, MAX_BLOCK_CHUNKS))
        return chunks - chunks % BLOCK_CHUNKS
