"""The bodies of answers: where they come from, how fast they go, how they are spoilt."""

from __future__ import annotations

import io
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.cluster.osdf.rules import Strike

BUFFER_BYTES = 256 * 1024
LINK_BYTES = 64 * 1024  # at once on a link of many connections, which all send ahead by as much
SLACK_S = 0.01  # by which a pause may have been too long, and is made good
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


@dataclass
class Body:
    """A body of a known length, read once from its start; `readinto` returns 0 at its end."""

    readinto: Callable[[memoryview], int]
    length: int


@dataclass
class Pace:
    """The speed of a connection, or of a link of many; None is as fast as it goes."""

    bytes_per_s: float | None = None
    most_bytes: int = BUFFER_BYTES
    _free_s: float = 0.0  # when the link has carried all that it was given
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def piece_bytes(self) -> int:
        """How much to send at once: 10 ms of the link, between a byte and a buffer."""
        if self.bytes_per_s is None:
            return self.most_bytes
        return max(1, min(self.most_bytes, int(self.bytes_per_s / 100)))

    def pause_s(self, num_bytes: int) -> float:
        """How long to wait after sending that much."""
        if self.bytes_per_s is None:
            return 0.0
        with self._lock:
            now_s = time.monotonic()
            # A pause ends a millisecond late: without slack, one connection had half of a link.
            self._free_s = max(self._free_s, now_s - SLACK_S) + num_bytes / self.bytes_per_s
            return max(0.0, self._free_s - now_s)


def reader(content: bytes) -> Callable[[memoryview], int]:
    """A readinto over bytes."""
    return io.BytesIO(content).readinto


def parse_content_range(header: str | None) -> tuple[bool, int, int]:
    """(whether there is one, start, total size); start 0 without."""
    found = _CONTENT_RANGE.fullmatch(header or "")
    return (True, int(found[1]), int(found[3])) if found else (False, 0, 0)


def lie(start: int, length: int, total: int, what: str) -> str:
    """A Content-Range that is wrong in its start or total; 'body' leaves it right."""
    start += 1 if what == "start" else 0
    total += 1 if what == "total" else 0
    return f"bytes {start}-{start + length - 1}/{total}"


def flip(body: Body, strike: Strike, start: int) -> Body:
    """The body with some bytes inverted: at the object's offsets, or at one that is drawn."""
    places = {offset - start for offset in strike.fault.at}
    if not strike.fault.at and body.length:
        places = {strike.chance.randrange(body.length)}
    position = 0

    def readinto(view: memoryview) -> int:
        nonlocal position
        got = body.readinto(view)
        for place in places:
            if position <= place < position + got:
                view[place - position] ^= 0xFF
        position += got
        return got

    return Body(readinto, body.length)


def rotate(body: Body) -> Body:
    """The body with every byte changed: what bytes from another place in the object look like."""

    def readinto(view: memoryview) -> int:
        got = body.readinto(view)
        view[:got] = bytes(view[:got]).translate(_ROTATED)
        return got

    return Body(readinto, body.length)


def extend(body: Body, extra_bytes: int) -> Body:
    """The body with zeros behind it."""
    rest = extra_bytes

    def readinto(view: memoryview) -> int:
        nonlocal rest
        if got := body.readinto(view):
            return got
        got = min(rest, len(view))
        view[:got] = bytes(got)
        rest -= got
        return got

    return Body(readinto, body.length + extra_bytes)


_ROTATED = bytes((value + 1) % 256 for value in range(256))
