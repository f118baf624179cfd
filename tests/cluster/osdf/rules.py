"""What can go wrong on command: the faults, which request each one strikes, drawn from a seed."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any

KINDS = {
    "hang": "takes the request and says nothing for seconds (None: until the client leaves)",
    "close": "takes the request and closes the connection without a word",
    "stall": "falls silent inside the body for seconds (None: until the client leaves)",
    "drip": "sends the rest of the body at bytes_per_s",
    "truncate": "ends the connection inside the body, as if that were all",
    "reset": "resets the connection (TCP RST) inside the body",
    "flip": "flips bits: at the object's offsets in `at`, or one byte of the answer, drawn",
    "status": "answers `status` (404, 429, 500, 503 ...), with Retry-After: retry_after if given",
    "ignore_range": "answers 200 with the whole object where a range was asked for",
    "wrong_range": "a Content-Range with a wrong `what`: start, total; or body: other bytes",
    "extend": "sends extra_bytes more than was asked, and says so in Content-Length",
    "change": "serves the object `to` in place of this one (it was changed)",
    "loop": "redirects to itself for ever",
    "ingress": "answers with the HTML page of a web server in front whose backend restarts",
    "headers": "sets the headers of `set_headers` in the answer; None removes one",
    "links": "the director names `caches` (of cache1, cache2, origin), in that order",
    "wan": "delay_s before each answer and for each round trip of the connection, bytes_per_s",
    "link": "as wan, but all connections together have bytes_per_s",
}


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, and for which requests."""

    kind: str
    # which requests: shell patterns, then a share of them
    server: str = "*"  # director, origin, cache1 or cache2
    path: str = "*"  # the object's path, such as /public/big.bin
    method: str = "*"
    share: float = 1.0  # of the matching requests, drawn from the seed, whatever their order
    skip: int = 0  # leaves the first matching requests alone (in the order of arrival)
    times: int | None = None  # strikes at most that often
    for_s: float | None = None  # ends that many seconds after the first request that it matches
    # where in the body it strikes: after_bytes if given, else that share of it, else drawn
    after_bytes: int | None = None
    after_share: float | None = None
    # what it does, by kind
    seconds: float | None = None
    bytes_per_s: float = 1.0
    delay_s: float = 0.0
    status: int | None = None  # 503; of an ingress page 404
    retry_after: str | None = None
    at: Sequence[int] = ()
    what: str = "start"
    extra_bytes: int = 1000
    to: str = ""
    set_headers: dict[str, str | None] = field(default_factory=dict)
    caches: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"no fault is called {self.kind!r}; there are {', '.join(KINDS)}")

    def matches(self, request: Request) -> bool:
        """Whether the fault is meant for such a request."""
        return (
            fnmatchcase(request.server, self.server)
            and fnmatchcase(request.path, self.path)
            and fnmatchcase(request.method, self.method)
        )

    def as_json(self) -> dict[str, Any]:
        """The fields that say something: None is the default of every field that can be None."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Request:
    """What a draw depends on."""

    server: str
    method: str
    path: str
    range: str = ""


@dataclass
class Strike:
    """A fault that hits a request; `chance` draws what the fault leaves open."""

    fault: Fault
    chance: random.Random
    over: threading.Event  # set when the fault is withdrawn

    def offset(self, length: int) -> int:
        """Where in a body of that length it strikes."""
        if self.fault.after_bytes is not None:
            return min(self.fault.after_bytes, length)
        share = self.fault.after_share
        return int(length * (self.chance.random() if share is None else share))


class FaultSet:
    """Faults that were set together, with their seed and the count of their strikes."""

    def __init__(self, faults: Sequence[Fault], seed: int) -> None:
        self.faults = list(faults)
        self.seed = seed
        self.over = threading.Event()
        self.hits = [0] * len(self.faults)
        self._seen: Counter[tuple[int, Request | None]] = Counter()
        self._met_s: dict[int, float] = {}  # when each fault met its first request
        self._lock = threading.Lock()

    def draw(self, request: Request, taken: Sequence[str] = ()) -> list[Strike]:
        """The faults that hit this request, one of a kind, and none of the kinds that are taken."""
        strikes: dict[str, Strike] = {}
        with self._lock:
            for number, fault in enumerate(self.faults):
                if fault.kind in strikes or fault.kind in taken:
                    continue
                strike = self._draw_one(number, fault, request)
                if strike is not None:
                    strikes[fault.kind] = strike
        return list(strikes.values())

    def _draw_one(self, number: int, fault: Fault, request: Request) -> Strike | None:
        if not fault.matches(request):
            return None
        met_s = self._met_s.setdefault(number, time.monotonic())
        if fault.for_s is not None and time.monotonic() > met_s + fault.for_s:
            return None
        # The n-th repetition of one request has its own draw, so that a retry can succeed; the
        # order in which different requests arrive changes nothing.
        repetition = self._seen[number, request]
        arrival = self._seen[number, None]
        self._seen[number, request] += 1
        self._seen[number, None] += 1
        if arrival < fault.skip or self.hits[number] == fault.times:
            return None
        key = f"{self.seed}|{number}|{request}|{repetition}".encode()
        chance = random.Random(hashlib.blake2b(key, digest_size=8).digest())
        if chance.random() >= fault.share:
            return None
        self.hits[number] += 1
        return Strike(fault, chance, self.over)


class Faults:
    """All fault sets that are active now, by their id."""

    def __init__(self) -> None:
        self._sets: dict[str, FaultSet] = {}
        self._lock = threading.Lock()

    def add(self, name: str, faults: Sequence[Fault], seed: int) -> None:
        with self._lock:
            self._sets[name] = FaultSet(faults, seed)

    def hits(self, name: str) -> list[int]:
        """How often each fault of the set has struck."""
        with self._lock:
            return list(self._sets[name].hits)

    def remove(self, name: str) -> list[int]:
        """Withdraws a set: what it holds up goes on. Returns its hits."""
        with self._lock:
            gone = self._sets.pop(name)
        gone.over.set()
        return gone.hits

    def draw(self, request: Request) -> dict[str, Strike]:
        """The faults that hit this request, by kind; those that were set first come first."""
        with self._lock:
            active = list(self._sets.values())
        strikes: dict[str, Strike] = {}
        for fault_set in active:
            drawn = fault_set.draw(request, taken=list(strikes))
            strikes |= {strike.fault.kind: strike for strike in drawn}
        return strikes
