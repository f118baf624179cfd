"""Headers of an HTTP answer, read strictly: where its body ends, and when to ask again.

http.client takes any number that int() takes (+5, 1_0, -3), the first of two lengths that differ,
and what is not exactly "chunked" as if it were no encoding at all; the framing would be stored as
bytes of the object.
"""

from __future__ import annotations

import email.utils
import re
from collections.abc import Mapping, Sequence
from email import errors
from typing import Protocol

from dataset.untrusted import parse_count, shorten

MAX_DATE_CHARS = 64
MAX_LINE = 4096
MAX_TRAILERS = 100
_CHUNK_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;.*)?\r?\n", re.DOTALL)


class ProtocolError(OSError):
    """An answer that breaks the rules of HTTP or is not what was asked for."""


class NotTheObject(ProtocolError):
    """A sound answer of another kind, such as a page for people: asking again changes nothing."""


class Reader(Protocol):
    """What http.client reads the body from."""

    def readline(self, limit: int, /) -> bytes: ...

    def readinto1(self, view: memoryview, /) -> int: ...


# At such a line http.client starts the body; a later length or encoding would be lost.
_BROKEN_HEAD = (errors.MissingHeaderBodySeparatorDefect, errors.FirstHeaderLineIsContinuationDefect)


def check_head(defects: Sequence[object]) -> None:
    """Raises if a line of the head is not a valid header, such as 'Transfer-Encoding : chunked'."""
    if any(isinstance(defect, _BROKEN_HEAD) for defect in defects):
        raise ProtocolError("a line of the head is not a header")


def is_chunked(headers: Mapping[str, str]) -> bool:
    """Whether the body comes in chunks; any other transfer encoding is refused."""
    coding = headers.get("transfer-encoding", "").strip().lower()
    if coding not in ("", "identity", "chunked"):
        raise ProtocolError(f"Transfer-Encoding {shorten(coding)} is not known")
    return coding == "chunked"


def read_length(headers: Mapping[str, str]) -> int | None:
    """The Content-Length; None without one, refused when there are two or it is no number."""
    if "content-length" not in headers:
        return None
    text = headers["content-length"]
    values = {value.strip() for value in text.split(",")}
    try:
        (value,) = values
        return parse_count(value)
    except ValueError:
        raise ProtocolError(f"Content-Length {shorten(text)}") from None


class ChunkedBody:
    """The bytes of a chunked body."""

    def __init__(self, file: Reader) -> None:
        self._file = file
        self._left = 0  # of the present chunk
        self._is_first = True
        self._is_done = False

    def readinto(self, view: memoryview) -> int:
        """Bytes of one receive into the view; 0 at the end of the body."""
        if not self._left and not self._start_chunk():
            return 0
        got = self._file.readinto1(view[: self._left])
        if not got:
            raise ProtocolError("ended early")
        self._left -= got
        return got

    def _start_chunk(self) -> bool:
        """Reads the size of the next chunk; False at the end of the body."""
        if self._is_done:
            return False
        if not self._is_first and self._file.readline(MAX_LINE) not in (b"\r\n", b"\n"):
            raise ProtocolError("a chunk does not end where it should")
        self._is_first = False
        line = self._file.readline(MAX_LINE)
        found = _CHUNK_SIZE.fullmatch(line)
        if not found:
            raise ProtocolError(f"chunk size {shorten(line[:64])}" if line else "ended early")
        self._left = int(found[1], 16)
        if not self._left:
            self._skip_trailers()
        return self._left > 0

    def _skip_trailers(self) -> None:
        self._is_done = True
        for _ in range(MAX_TRAILERS):
            line = self._file.readline(MAX_LINE)
            if line in (b"\r\n", b"\n"):
                return
            if not line.endswith(b"\n"):
                break
        raise ProtocolError("the last chunk does not end")


def read_retry_after(headers: Mapping[str, str], now: float) -> float:
    """Seconds of a Retry-After header, given as a number or as a date; 0 without one."""
    text = headers.get("retry-after", "").strip()
    try:
        return float(parse_count(text))
    except ValueError:
        pass
    if len(text) > MAX_DATE_CHARS:
        return 0.0
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - now)
    except (TypeError, ValueError, IndexError, OverflowError):
        return 0.0
