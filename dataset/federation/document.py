"""Small documents over HTTP: look-ups, listings, digests; one that comes too slowly is cut."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, TypeVar

from dataset.federation.connection import (
    MAX_REDIRECTS,
    NETWORK_ERRORS,
    PIECE_BYTES,
    REDIRECTS,
    Answer,
    Connection,
    Pool,
    find_place,
    redirect_target,
)
from dataset.federation.framing import ProtocolError
from dataset.redaction import redact

T = TypeVar("T")
Document = tuple[int, dict[str, str], bytes, str]
WATCH_S = 0.1
CUT_S = 2 * WATCH_S  # within this a connection beyond its limit is cut
MAX_LIMITS = 30  # a document may take so many time limits while it flows
RIVAL_S = 3.0  # a small question that is silent for so long is asked once more


class Watch:
    """Cuts the connection of a document that makes no progress; a few bytes do not count.

    One thread watches all of them: one for each of thousands of small files would cost too much.
    """

    _open: ClassVar[set[Watch]] = set()
    _changed: ClassVar[threading.Condition] = threading.Condition()
    _thread: ClassVar[threading.Thread | None] = None

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._last = time.monotonic() + MAX_LIMITS * limit_s
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
        self._end = min(time.monotonic() + self._limit_s, self._last)

    def hold(self, connection: Connection) -> None:
        """Watches this connection from now on."""
        with Watch._changed:
            self._connection = connection
            if self.has_cut:
                connection.cut()

    def let_go(self) -> None:
        """Watches nothing until the next `hold`."""
        with Watch._changed:
            self._connection = None

    def stop(self) -> None:
        """Stops watching: once this returns, another thread may use the connection."""
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


@contextmanager
def watching(limit_s: float) -> Iterator[Watch]:
    """Cuts the connection held inside after limit_s without progress; raises that it stalled."""
    watch = Watch(limit_s)
    try:
        yield watch
    except NETWORK_ERRORS:
        if not watch.has_cut:
            raise
    finally:
        watch.stop()
    if watch.has_cut:  # without a length the cut looks like the end of the body
        raise ProtocolError(f"stalled: no whole answer within {limit_s:.0f} s")


def fill(
    readinto: Callable[[memoryview], int], view: memoryview, on_progress: Callable[[], None]
) -> None:
    """Fills the view where no supervisor watches; less than 16 KiB does not count as progress."""
    filled = counted = 0
    while filled < len(view):
        got = readinto(view[filled:])
        if not got:
            raise ProtocolError("ended early")
        filled += got
        if filled - counted >= PIECE_BYTES:
            counted = filled
            on_progress()


def get_document(
    pool: Pool, url: str, headers: Mapping[str, str], method: str = "GET", follow: bool = True
) -> Document:
    """(status, headers, body, final address) of a small document.

    Redirects to another host, port or scheme are followed without Authorization, which is meant
    for the first server alone. One time limit, the pool's (that of a block), holds for them all.
    """
    headers = dict(headers)
    with watching(pool.timeout_s) as watch:
        for _ in range(MAX_REDIRECTS + 1):
            answer, body = _get_once(pool, url, headers, method, watch)
            if not follow or answer.status not in REDIRECTS or "location" not in answer.headers:
                return answer.status, answer.headers, body, url
            target = redirect_target(url, answer.headers["location"])
            if find_place(target) != find_place(url):
                headers.pop("Authorization", None)
            url = target
    raise ProtocolError(f"more than {MAX_REDIRECTS} redirects, the last to {redact(url)}")


def _get_once(
    pool: Pool, url: str, headers: Mapping[str, str], method: str, watch: Watch
) -> tuple[Answer, bytes]:
    """One answer and its body; the watch cuts it when its head or its body comes too slowly."""
    answer = pool.ask(method, url, headers, watch.hold)
    keep = False
    try:
        body = answer.read_all(watch.note_progress) if method != "HEAD" else b""
        answer.release(answer.length or 0)
        watch.let_go()  # another thread may use the connection from here on
        keep = not watch.has_cut and answer.headers.get("connection", "").lower() != "close"
        return answer, body
    finally:
        if keep and answer.connection.is_quiet:
            pool.give(answer.connection)
        else:
            answer.connection.close()


def get_with_rival(
    pool: Pool,
    url: str,
    headers: Mapping[str, str],
    method: str = "GET",
    follow: bool = True,
    rival_s: float | None = None,
) -> Document:
    """As get_document; after some seconds of silence a second request is sent beside the first."""

    def ask() -> Document:
        return get_document(pool, url, headers, method, follow)

    found = ask_rivals([ask, ask], rival_s or RIVAL_S, pool.timeout_s + CUT_S)
    if found is None:
        raise ProtocolError(f"stalled: no answer within {pool.timeout_s:.0f} s")
    return found


def ask_rivals(
    questions: Sequence[Callable[[], T | None]], rival_s: float, limit_s: float
) -> T | None:
    """The first answer that is not None; None when there is none within the limit.

    The next question is asked when the one before failed, or is silent for rival_s. An error is
    raised unless a rival is running. A thread that hangs is not waited for.
    """
    answers: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

    def ask(question: Callable[[], T | None]) -> None:
        try:
            answers.put((question(), None))
        except Exception as error:
            answers.put((None, error))

    waiting, num_open, end = deque(questions), 0, time.monotonic() + limit_s
    while waiting or num_open:
        if waiting:
            num_open += 1
            threading.Thread(target=ask, args=(waiting.popleft(),), daemon=True).start()
        left_s = max(0.0, end - time.monotonic())
        try:
            answer, error = answers.get(timeout=min(rival_s, left_s) if waiting else left_s)
        except queue.Empty:
            if time.monotonic() >= end:
                return None
            continue
        num_open -= 1
        if answer is not None:
            return answer
        if error is not None and not num_open:
            raise error
    return None
