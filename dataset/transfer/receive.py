"""One range of an object over one connection: requested, checked, passed on chunk by chunk."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

from dataset.federation.connection import (
    MAX_REDIRECTS,
    REDIRECTS,
    Answer,
    Connection,
    Pool,
    explain,
    redirect_target,
)
from dataset.federation.framing import NotTheObject, ProtocolError, read_retry_after
from dataset.federation.lookup import Lookup
from dataset.federation.servers import Problem, Server
from dataset.redaction import redact
from dataset.spelling import decode
from dataset.transfer.blocks import Lease
from dataset.transfer.journal import CHUNK, chunk_length
from dataset.transfer.waste import Waste
from dataset.untrusted import parse_count, shorten

PROGRESS_BYTES = 16 << 10  # less than this within the stall time counts as a stall


class StatusError(OSError):
    """A server answered, but not with the bytes."""

    def __init__(self, status: int, retry_after_s: float = 0.0) -> None:
        super().__init__(f"{status}")
        self.status = status
        self.retry_after_s = retry_after_s


class OtherSize(OSError):
    """A server has an object of another size under this name."""

    def __init__(self, size: int) -> None:
        super().__init__(f"{size} bytes")
        self.size = size


class OtherVersion(OSError):
    """The ETag of the object changed at one server while we were reading it."""


def read_problem(error: BaseException) -> Problem:
    """How a request failed, from one of NETWORK_ERRORS."""
    if isinstance(error, StatusError):
        return Problem(str(error.status), error.status, error.retry_after_s)
    return Problem(explain(error))


class Body(Protocol):
    """Where the bytes of a range come from: an HTTP answer or a file."""

    def readinto(self, view: memoryview) -> int: ...

    def release(self, received: int) -> bool: ...


class FileBody:
    """The bytes of a local file, for file:// addresses."""

    def __init__(self, path: Path, start: int) -> None:
        self._fd = os.open(path, os.O_RDONLY)
        self._position = start

    def readinto(self, view: memoryview) -> int:
        got = os.preadv(self._fd, [view], self._position)
        self._position += got
        return got

    def release(self, received: int) -> bool:
        os.close(self._fd)
        return False


_CONTENT_RANGE = re.compile(r"bytes\s+(?:(\d+)-(\d+)|\*)/(\d+)\s*", re.IGNORECASE)


class GoodAnswer(NamedTuple):
    """What an answer that passed its checks tells of the object."""

    skip: int  # body bytes before those that were asked for
    etag: str | None
    is_range: bool


def check_answer(
    answer: Answer, start: int, end: int, size: int | None, server: Server
) -> GoodAnswer:
    """What the answer tells; raises unless it is bytes [start, end), or the whole object.

    Everything that could put a wrong byte into the file is refused here: another status, a
    Content-Range other than asked for, another size of the object, more or fewer bytes.
    """
    if answer.status == 416:
        first, _, total = parse_content_range(answer)
        if first is None and total <= start and total != size:
            raise OtherSize(total)
        raise ProtocolError("416 for a range inside the object")
    if answer.status not in (200, 206):
        raise StatusError(answer.status, read_retry_after(answer.headers, time.time()))
    if answer.headers.get("content-encoding", "identity").lower() != "identity":
        raise NotTheObject(f"content-encoding {answer.headers['content-encoding']!r}")
    etag = _own_etag(answer, server)
    if server.etag is not None and etag is not None and etag != server.etag:
        raise OtherVersion(f"its ETag was {server.etag} and is {etag}")
    if answer.status == 200:
        if _is_page(answer):
            raise NotTheObject("an HTML page instead of the object; is a login needed?")
        if "content-range" in answer.headers:
            raise ProtocolError("200 with a Content-Range: whole or part?")
        if size is not None and answer.length is not None and answer.length != size:
            if server.gave_range:  # a maintenance page, perhaps: it says nothing of the object
                raise ProtocolError(f"200 and {answer.length} bytes instead of a range")
            raise OtherSize(answer.length)
        if answer.length is None:
            # Without chunks either, it may be a head that was cut off.
            is_sound = "transfer-encoding" in answer.headers
            raise (NotTheObject if is_sound else ProtocolError)("200 without a length")
        return GoodAnswer(start, etag, is_range=False)
    _check_range(answer, start, end, size)
    return GoodAnswer(0, etag, is_range=True)


def _check_range(answer: Answer, start: int, end: int, size: int | None) -> None:
    """Raises unless a 206 is bytes [start, end) of an object of that size, as one part."""
    if answer.headers.get("content-type", "").lower().startswith("multipart/byteranges"):
        raise ProtocolError("206 in several parts")
    first, last, total = parse_content_range(answer)
    if first is None or last is None or not first <= last < total:
        raise ProtocolError(f"Content-Range {shorten(answer.headers['content-range'])}")
    if size is not None and total != size:
        raise OtherSize(total)
    if (first, last) != (start, end - 1):
        raise ProtocolError("wrong Content-Range")
    if answer.length is not None and answer.length != end - start:
        raise ProtocolError("wrong Content-Length")


def parse_content_range(answer: Answer) -> tuple[int | None, int | None, int]:
    """(first byte, last byte, size of the object); no bytes where a range has none of them."""
    text = answer.headers.get("content-range", "")
    found = _CONTENT_RANGE.fullmatch(text)
    if not found:
        raise ProtocolError(f"{answer.status} without a proper Content-Range")
    try:
        first, last = (parse_count(n) if n else None for n in found.groups()[:2])
        return first, last, parse_count(found[3])
    except ValueError:
        raise ProtocolError(f"Content-Range {shorten(text)}") from None


def _own_etag(answer: Answer, server: Server) -> str | None:
    """The ETag, if it is the server's own: mirrors that it redirects to have others."""
    if urlsplit(answer.url)[:2] != urlsplit(server.url)[:2]:
        return None
    etag = answer.headers.get("etag")
    return redact(etag.removeprefix("W/")) if etag else None


def _is_page(answer: Answer) -> bool:
    """Whether a server answers with an HTML page that was not requested."""
    is_html = answer.headers.get("content-type", "").lower().startswith("text/html")
    return is_html and not urlsplit(answer.url).path.lower().endswith((".html", ".htm"))


def open_range(
    pool: Pool,
    lookup: Lookup,
    server: Server,
    start: int,
    end: int | None,
    hold: Callable[[Connection], None] = lambda connection: None,
) -> Answer:
    """The answer to a range request (without an end: to one for the whole object).

    Redirects are followed, and get no token.
    """
    url = server.redirected or server.url
    asked = {"Accept-Encoding": "identity"}
    if end is not None:
        asked["Range"] = f"bytes={start}-{end - 1}"
    secret = {} if server.redirected else lookup.headers(url, server.wants_token)
    for _ in range(MAX_REDIRECTS + 1):
        answer = pool.ask("GET", url, {**asked, **secret}, hold)
        if answer.status not in REDIRECTS or "location" not in answer.headers:
            return answer
        target = redirect_target(url, answer.headers["location"])
        answer.connection.close()
        if server.wants_token or urlsplit(target)[:2] != urlsplit(url)[:2]:
            secret = {}
        url = target
        server.redirect(None if secret else target)
    server.redirect(None)
    raise ProtocolError("redirects in a loop")


def open_file_range(url: str, start: int) -> FileBody:
    """The bytes of a file:// address from `start` on."""
    return FileBody(Path(decode(urlsplit(url).path)), start)


Store = Callable[[Lease, memoryview, float], None]  # a whole chunk and the seconds that it took


class Receiver:
    """Receives leases for a transfer; `store` gets each whole chunk, with its lease."""

    def __init__(self, pool: Pool, lookup: Lookup, size: int, store: Store, waste: Waste) -> None:
        self._pool = pool
        self._lookup = lookup
        self._size = size
        self._store = store
        self._waste = waste

    def receive(self, lease: Lease, buffer: memoryview) -> None:
        """Fetches the chunks of a lease up to its end, which may move closer meanwhile."""
        server = lease.server
        assert server is not None
        lease.receive_into(buffer)
        start, end = lease.first * CHUNK + len(lease.prefix), min(lease.end * CHUNK, self._size)
        if server.url.startswith("file:"):
            self._pour(lease, open_file_range(server.url, start), buffer, 0)
            return
        keep = False
        try:
            answer = open_range(
                self._pool, self._lookup, server, start, end, lambda c: self._hold(lease, c)
            )
            found = check_answer(answer, start, end, self._size, server)
            server.note_answer(found.etag, found.is_range)
            keep = self._pour(lease, answer, buffer, found.skip)
        finally:
            with self._lookup.lock:  # from here on the supervisor cannot cut it any more
                connection = lease.let_go()
            if connection is not None:
                if keep:
                    self._pool.give(connection)
                else:
                    connection.close()

    def _hold(self, lease: Lease, connection: Connection) -> None:
        with self._lookup.lock:
            lease.hold(connection)

    def _pour(self, lease: Lease, body: Body, buffer: memoryview, skip: int) -> bool:
        """The body into chunks; whether its connection can be used again."""
        received = 0
        while received < skip:
            piece = buffer[: min(CHUNK, skip - received)]
            received += self._read(lease, body, piece)
            self._count_skipped(lease, len(piece))
        while lease.position < lease.end and not lease.cancelled:
            began = time.monotonic()
            view = buffer[: chunk_length(lease.position, self._size)]
            known = lease.start_chunk(view)
            received += self._read(lease, body, view, known, as_chunk=True)
            self._store(lease, view, time.monotonic() - began)
        return body.release(received)

    def _count_skipped(self, lease: Lease, num_bytes: int) -> None:
        with self._lookup.lock:
            self._waste.skipped += num_bytes
            if lease.server is not None:
                lease.server.count_bytes(num_bytes)

    def _read(
        self, lease: Lease, body: Body, view: memoryview, known: int = 0, as_chunk: bool = False
    ) -> int:
        """Fills the view after its known bytes; less than 16 KiB does not count as progress."""
        filled = counted = known
        while filled < len(view):
            got = body.readinto(view[filled:])
            if not got:
                raise ProtocolError("ended early")
            filled += got
            if as_chunk:
                lease.note_partial(filled)
            if filled - counted >= PROGRESS_BYTES:
                counted = filled
                lease.note_progress(time.monotonic())
        lease.note_progress(time.monotonic())
        return filled - known
