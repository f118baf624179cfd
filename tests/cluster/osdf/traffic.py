"""What the mini-OSDF was asked and what it sent, request by request."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any


@dataclass
class Entry:
    """One request; `bytes` are those of the body that were given to the connection."""

    server: str
    method: str
    path: str
    range: str
    scheme: str
    token: str  # where one was: "header", "query" or ""; never the token itself
    faults: list[str]
    connection: str  # the client's port: requests with the same one shared a connection
    status: int = 0
    bytes: int = 0
    started_s: float = field(default_factory=time.time)
    ended_s: float | None = None  # None while it goes on


class Traffic:
    """The latest requests, oldest first."""

    def __init__(self, num_kept: int = 200_000) -> None:
        self._entries: deque[Entry] = deque(maxlen=num_kept)
        self._lock = threading.Lock()

    def add(self, entry: Entry) -> None:
        with self._lock:
            self._entries.append(entry)

    def select(self, path: str, server: str) -> list[dict[str, Any]]:
        """The requests for the objects and servers that match the shell patterns."""
        with self._lock:
            entries = list(self._entries)
        return [
            asdict(entry)
            for entry in entries
            if fnmatchcase(entry.path, path) and fnmatchcase(entry.server, server)
        ]

    def forget(self, path: str) -> None:
        """Drops the requests for the objects that match."""
        with self._lock:
            kept = [entry for entry in self._entries if not fnmatchcase(entry.path, path)]
            self._entries = deque(kept, maxlen=self._entries.maxlen)
