"""The servers that hold an object: which to ask next, and what each did; no network here.

All that is known of a server is written in this file alone, by the verbs of `Server` and `Servers`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from dataset.redaction import redact

BACKOFF_S = 0.5
MAX_BACKOFF_S = 60.0
MAX_RETRY_AFTER_S = 300.0
IMPATIENT_S = 4.0  # if no server delivers, a resting one is tried again after this time
MAX_IMPATIENT = 20  # times in a row; in a longer outage the full backoff applies
MAX_WRONG_BLOCKS = 3  # a server that sent so many wrong blocks is not asked again
RATE_WEIGHT = 0.3


class Fault(Enum):
    """What makes a server useless for the rest of a transfer."""

    OTHER_SIZE = "has an object of another size"
    OTHER_BYTES = "sends other bytes than"
    WRONG_BYTES = "sends wrong bytes"
    NO_RANGES = "sends no parts of the object"


class ServerFault(NamedTuple):
    """A fault that was found in one server, and its detail: why it is not asked any more."""

    fault: Fault
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.fault.value} {self.detail}".rstrip()


class Problem(NamedTuple):
    """How a request failed."""

    text: str  # for counters and messages
    status: int = 0  # of HTTP; 0 without an answer
    retry_after_s: float = 0.0

    @property
    def is_missing(self) -> bool:
        return self.status == 404

    @property
    def is_denied(self) -> bool:
        return self.status in (401, 403)


@dataclass(eq=False)
class Server:
    """One server's copy of the object, with its history in this transfer."""

    # Its address
    url: str  # where to ask; may hold secrets in its query
    label: str  # its name in logs and summaries
    wants_token: bool = False
    is_origin: bool = False
    redirected: str | None = None  # where its redirect led, until that fails
    # What its answers tell of the object
    has_ranges: bool = True
    gave_range: bool = False  # it has answered a range with that range
    etag: str | None = None
    # Its health
    active: int = 0  # requests that are under way
    asked_at: float = 0.0  # when the last of them began
    rate: float = 0.0  # bytes/s of one connection, smoothed; 0 before the first answer
    failures: int = 0  # in a row
    blocked_until: float = 0.0
    told_to_wait_until: float = 0.0  # its Retry-After
    failed_at: float = 0.0
    last_problem: str = ""
    missing: bool = False  # its last answer was 404
    denied: bool = False  # its last answer was 401 or 403
    refused: ServerFault | None = None  # why it is not asked any more
    was_trusted: bool = False  # others were refused because they differ from it
    # Its tally, for the summary
    bytes: int = 0
    seconds: float = 0.0
    stalls: int = 0
    wrong_blocks: int = 0
    errors: Counter[str] = field(default_factory=Counter)

    def is_free(self, now: float, is_idle: bool) -> bool:
        """Whether it may be asked: it has rested, or no other server is at work."""
        if self.blocked_until <= now:
            return True
        may_hurry = is_idle and self.failures <= MAX_IMPATIENT and self.told_to_wait_until <= now
        return may_hurry and now - self.failed_at >= IMPATIENT_S

    def begin(self, now: float) -> None:
        """A request is on its way."""
        self.active += 1
        self.asked_at = now

    def end(self, seconds: float = 0.0) -> None:
        """The request is over; `seconds` count for the summary."""
        self.active -= 1
        self.seconds += seconds

    def count_bytes(self, num_bytes: int) -> None:
        """Bytes came from it; a negative number takes back what was counted."""
        self.bytes += num_bytes

    def note_answer(self, etag: str | None, is_range: bool, was_range_asked: bool = True) -> None:
        """Bytes of the object came as an answer, as a range or as the whole."""
        self.note_etag(etag)
        self.gave_range = self.gave_range or is_range
        self.has_ranges = (self.has_ranges and is_range) or not was_range_asked

    def note_etag(self, etag: str | None) -> None:
        """The first ETag counts: a later one that differs is another version."""
        self.etag = self.etag or etag

    def forget_etag(self) -> None:
        """The next one counts as the first."""
        self.etag = None

    def redirect(self, target: str | None) -> None:
        """Later requests go to the target at once; None: to its own address."""
        self.redirected = target

    def refuse(self, fault: Fault, detail: str = "") -> None:
        """It is not asked any more."""
        self.refused = ServerFault(fault, detail)

    def refuse_bytes(self, other: Server, num_wrong: int) -> None:
        """It is not asked any more, because its bytes differ from those of another server."""
        self.refuse(Fault.OTHER_BYTES, other.label)
        self.wrong_blocks += num_wrong
        self.errors["wrong bytes"] += num_wrong

    def trust(self) -> None:
        """Others are refused because they differ from it."""
        self.refused, self.was_trusted = None, True

    def describe(self) -> dict[str, Any]:
        """The server in the summary."""
        return {
            "source": self.label,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 3),
            "stalls": self.stalls,
            "errors": dict(self.errors),
            "wrong_blocks": self.wrong_blocks,
            "refused": str(self.refused) if self.refused else None,
        }


def name_server(url: str) -> str:
    """The name of an address's server in logs and summaries, without secrets."""
    parts = urlsplit(url)
    return redact(f"{parts.scheme}://{parts.netloc}") if parts.netloc else "file"


class Servers:
    """All servers of a transfer in the director's order; the caller holds the lock."""

    def __init__(self, max_parallel: int, rng: random.Random | None = None) -> None:
        self.all: list[Server] = []
        self.are_all = False  # whether the director was asked for the origin too
        self._max_parallel = max_parallel
        self._random = rng or random.Random()

    def update(self, urls: Iterable[str], wants_token: bool, is_origin: bool = False) -> None:
        """Takes in the addresses of a look-up; known ones keep their history."""
        known = {server.url: server for server in self.all}
        for url in urls:
            if url in known:
                known[url].wants_token = wants_token
                continue
            known[url] = Server(url, name_server(url), wants_token, is_origin)
            self.all.append(known[url])

    def forget(self) -> None:
        """Drops them with their history: the next look-up names those of today."""
        self.all.clear()

    def note_all(self, are_all: bool = True) -> None:
        """Whether the director has named all that there are, the origin too."""
        self.are_all = are_all

    @property
    def usable(self) -> list[Server]:
        return [server for server in self.all if not server.refused]

    def pick(self, now: float, avoid: Collection[Server] = ()) -> Server | None:
        """The server for the next request: the fastest per connection among the nearest few.

        One that failed gets a single request at a time until it delivers again. `avoid` is
        respected while any other server is left.
        """
        usable = self.usable
        others = [server for server in usable if server not in avoid]
        is_idle = not any(server.active for server in usable)
        free = [
            server
            for server in others or usable
            if server.is_free(now, is_idle)
            and (server.failures == 0 or server.active == 0)
            and (server.has_ranges or server.active == 0)
        ]
        # The origin serves everyone's caches: it is used when they have failed, not for speed.
        caches = [server for server in free if not server.is_origin]
        nearest = (caches or free)[: self._max_parallel]
        best_known = max((server.rate for server in nearest), default=0.0) or 1.0
        return min(nearest, key=lambda s: (s.active + 1) / (s.rate or best_known), default=None)

    def has_other(self, avoid: Collection[Server], now: float) -> bool:
        """Whether another server than these could take over right now."""
        return any(s not in avoid and s.blocked_until <= now for s in self.usable)

    def refuse_rangeless(self) -> list[Server]:
        """Leaves out servers that send only the whole; all that are left out for it."""
        for server in self.usable:
            if not server.has_ranges:
                server.refuse(Fault.NO_RANGES)
        return [s for s in self.all if s.refused and s.refused.fault is Fault.NO_RANGES]

    def delivered(self, server: Server, num_bytes: int, seconds: float) -> None:
        """One whole answer arrived."""
        server.failures = 0
        server.missing = server.denied = False
        if seconds > 0 and num_bytes:
            rate = num_bytes / seconds
            server.rate += (rate - server.rate) * RATE_WEIGHT if server.rate else rate

    def failed(
        self,
        server: Server,
        now: float,
        problem: Problem,
        has_delivered: bool = False,
    ) -> None:
        """Notes a failed request: the server rests, twice as long every time in a row.

        After a request that delivered some chunks it rests only as after a first failure.
        """
        server.failures = 1 if has_delivered else server.failures + 1
        server.failed_at = now
        server.errors[problem.text] += 1
        server.last_problem = problem.text
        server.redirected = None
        server.missing, server.denied = problem.is_missing, problem.is_denied
        wait_s = min(MAX_BACKOFF_S, BACKOFF_S * 2.0 ** min(server.failures - 1, 16))
        wait_s *= self._random.uniform(0.5, 1.0)  # so that a thousand jobs do not come back at once
        server.told_to_wait_until = now + min(problem.retry_after_s, MAX_RETRY_AFTER_S)
        server.blocked_until = max(server.blocked_until, now + wait_s, server.told_to_wait_until)

    def stalled(self, server: Server, now: float) -> None:
        """Notes a silent connection; several that stall together count as one failure."""
        server.stalls += 1
        server.failed_at = now
        if now >= server.blocked_until:
            server.failures += 1
            server.last_problem = "stalled"
            wait_s = min(MAX_BACKOFF_S, 2.0 * BACKOFF_S * 2.0 ** min(server.failures, 16))
            server.blocked_until = now + wait_s * self._random.uniform(0.5, 1.0)

    def sent_wrong_block(self, server: Server, is_alone: bool = True) -> None:
        """Notes a wrong block; refuses the server after several, if it sent the block alone."""
        server.wrong_blocks += 1
        server.errors["wrong bytes"] += 1
        others = [s for s in self.usable if s is not server]
        if server.wrong_blocks >= MAX_WRONG_BLOCKS and others and is_alone:
            server.refuse(Fault.WRONG_BYTES)

    def unblock(self) -> None:
        """Ends all rests, after the token changed."""
        for server in self.all:
            if server.denied:
                server.blocked_until, server.failures, server.denied = 0.0, 0, False

    def agree_on(self, problem: str) -> bool:
        """Whether every server's last answer was this problem, 'missing' or 'denied'."""
        usable = self.usable
        return bool(usable) and all(getattr(server, problem) for server in usable)
