"""What a fetch did, as the JSON summary tells it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from dataset.redaction import printable, redact

log = logging.getLogger("trainyard.fetch")


@dataclass
class Summary:
    """One object, or all small files of a collection."""

    url: str
    path: str
    size: int = 0
    status: str = "failed"
    seconds: float = 0.0
    resumed_bytes: int = 0
    fetched_bytes: int = 0
    bytes_twice: dict[str, int] = field(default_factory=dict)
    sources: list[dict[str, Any]] = field(default_factory=list)
    hedges: int = 0
    lookups: int = 0
    verified: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: str | None = None

    def say(self, note: str) -> None:
        """Logs a fact for the user now, and keeps it for the summary."""
        note = printable(redact(note))
        log.info("%s", note)
        self.notes.append(note)
