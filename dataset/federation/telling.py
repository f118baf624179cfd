"""Logs problems: a repeated one is logged once, and then again after some minutes."""

from __future__ import annotations

import logging
import threading
import time

log = logging.getLogger("trainyard.fetch")

AGAIN_S = 300.0


class Teller:
    """Logs the problems of one look-up; those of an optional object only with --verbose."""

    def __init__(self, is_optional: bool = False) -> None:
        self._is_optional = is_optional
        self._told: dict[str, tuple[str, float]] = {}  # who -> its last problem, when it was told
        self._lock = threading.Lock()

    def tell(self, who: str, problem: str) -> None:
        """One line, unless it is the same as the last one about `who`."""
        now = time.monotonic()
        with self._lock:
            last, told_at = self._told.get(who, ("", 0.0))
            is_news = last != problem or now - told_at >= AGAIN_S
            if is_news:
                self._told[who] = (problem, now)
        log.log(
            logging.INFO if is_news and not self._is_optional else logging.DEBUG,
            "%s: %s",
            who,
            problem,
        )
