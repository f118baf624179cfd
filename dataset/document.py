"""Small documents over HTTP: look-ups, listings, digests; one that drips is cut."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import ClassVar

from dataset.connection import (
    CONNECT_S,
    MAX_REDIRECTS,
    NETWORK_ERRORS,
    REDIRECTS,
    Answer,
    Connection,
    Pool,
    find_place,
    redirect_target,
)
from dataset.framing import ProtocolError
from dataset.redaction import redact

WATCH_S = 0.1


class Watch:
    """Cuts the connection of a document that makes no progress: a drip is no progress.

    One thread looks after all: to start one for each of thousands of small files costs too much.
    """

    _open: ClassVar[set[Watch]] = set()
    _changed: ClassVar[threading.Condition] = threading.Condition()
    _thread: ClassVar[threading.Thread | None] = None

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._connection: Connection | None = None
        self.has_cut = False
        self.note_progress()
        with Watch._changed:
            Watch._open.add(self)
            if Watch._thread is None or not Watch._thread.is_alive():
                Watch._thread = threading.Thread(target=Watch._look, name="watch", daemon=True)
                Watch._thread.start()
            elif len(Watch._open) == 1:
                Watch._changed.notify()

    def note_progress(self) -> None:
        self._end = time.monotonic() + self._limit_s

    def hold(self, connection: Connection) -> None:
        """Watches this connection from now on."""
        with Watch._changed:
            self._connection = connection
            if self.has_cut:
                connection.cut()

    def stop(self) -> None:
        """Nothing is cut once this returns: another thread may use the connection then."""
        with Watch._changed:
            Watch._open.discard(self)

    @staticmethod
    def _look() -> None:
        with Watch._changed:
            while True:
                now = time.monotonic()
                for watch in [watch for watch in Watch._open if now >= watch._end]:
                    Watch._open.discard(watch)
                    watch.has_cut = True
                    if watch._connection is not None:
                        watch._connection.cut()
                Watch._changed.wait(WATCH_S if Watch._open else None)


def get_document(
    pool: Pool, url: str, headers: Mapping[str, str], method: str = "GET", follow: bool = True
) -> tuple[int, dict[str, str], bytes, str]:
    """(status, headers, body, final address) of a small document.

    Redirects to another host, port or scheme are followed without Authorization: it is meant for
    the first server alone.
    """
    headers = dict(headers)
    for _ in range(MAX_REDIRECTS + 1):
        answer, body = _get_once(pool, url, headers, method)
        if not follow or answer.status not in REDIRECTS or "location" not in answer.headers:
            return answer.status, answer.headers, body, url
        target = redirect_target(url, answer.headers["location"])
        if find_place(target) != find_place(url):
            headers.pop("Authorization", None)
        url = target
    raise ProtocolError(f"more than {MAX_REDIRECTS} redirects, the last to {redact(url)}")


def _get_once(
    pool: Pool, url: str, headers: Mapping[str, str], method: str
) -> tuple[Answer, bytes]:
    """One answer and its body; raises when it drips, be it in its head or in its body."""
    limit_s = min(CONNECT_S, pool.timeout_s) + pool.timeout_s
    watch = Watch(limit_s)
    try:
        answer = pool.ask(method, url, headers, watch.hold)
        try:
            body = answer.read_all(watch.note_progress) if method != "HEAD" else b""
            answer.release(answer.length or 0)
        except BaseException:
            answer.connection.close()
            raise
    except NETWORK_ERRORS:
        if watch.has_cut:
            raise ProtocolError(f"stalled: no whole answer within {limit_s:.0f} s") from None
        raise
    finally:
        watch.stop()
    if watch.has_cut:  # without a length the cut looks like the end of the body
        answer.connection.close()
        raise ProtocolError(f"stalled: no whole answer within {limit_s:.0f} s")
    if answer.connection.is_quiet and answer.headers.get("connection", "").lower() != "close":
        pool.give(answer.connection)
    else:
        answer.connection.close()
    return answer, body
