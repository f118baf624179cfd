"""Cuts an HTCondor event log into its events, in bounded memory: text, XML or JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

MAX_EVENT_BYTES = 2**20  # the largest of real logs have some kB
_HEADER_BYTES = 200

# "000 (794569.000.000) 2024-08-20 10:00:00 " and "… 08/20 10:00:00 " of older versions. It is
# looked for anywhere in a line: what follows a torn event starts where that one was cut.
HEADER = re.compile(
    rb"(?P<kind>[0-9]{3}) "
    rb"\((?P<cluster>[0-9]{1,9})\.(?P<proc>-?[0-9]{1,9})\.(?P<subproc>-?[0-9]{1,9})\) "
    rb"(?P<date>[0-9]{4}-[0-9]{2}-[0-9]{2}|[0-9]{2}/[0-9]{2})[ T]"
    rb"(?P<time>[0-9]{2}:[0-9]{2}:[0-9]{2})(?P<fraction>\.[0-9]{1,6})?(?P<zone>Z)?"
)
_END = re.compile(rb"\.\.\.\r?\n?")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')


@dataclass(frozen=True)
class Piece:
    """The bytes of one event; those of a text log begin with their header."""

    text: bytes
    header: re.Match[bytes] | None = None
    is_whole: bool = True  # False: too long to be an event, so only its header is used


def split_log(file: BinaryIO) -> Iterator[Piece | None]:
    """Each event of a log in turn; None for one that was cut short."""
    first = b""
    while not first and (line := file.readline(MAX_EVENT_BYTES)):
        first = line.lstrip()[:1]
    file.seek(0)
    lines = iter(lambda: file.readline(MAX_EVENT_BYTES), b"")
    if first == b"<":  # log_xml = true
        return _split_nested(lines, b"<c>", b"</c>")
    if first == b"{":  # an EVENT_LOG written as JSON
        return _split_nested(lines, b"{", b"}")
    return _split_text(lines)


def _split_text(lines: Iterator[bytes]) -> Iterator[Piece | None]:
    """Events end with a line of three dots; a new header inside one says that it was torn."""
    body, is_cut, at_start = bytearray(), False, True
    for line in lines:
        end = _END.match(line) if at_start else None
        at_start = line.endswith(b"\n")
        if end is None:
            body += line
            if len(body) > MAX_EVENT_BYTES:
                body, is_cut = _keep_header(body), True
            continue
        yield from _finish(bytes(body), is_cut)
        body, is_cut = bytearray(line[end.end() :]), False
    if body.strip():
        yield None


def _finish(body: bytes, is_cut: bool) -> Iterator[Piece | None]:
    headers = list(HEADER.finditer(body))
    if not headers:
        if body.strip():
            yield None
        return
    last = headers[-1]
    if body[: last.start()].strip():  # what stands before the last header was cut short
        yield None
    text = body[last.start() :] + b"...\n"
    header = HEADER.match(text)
    assert header is not None, "the text begins where the header was found"
    yield Piece(text, header, is_whole=not is_cut or last.start() > 0)


def _keep_header(body: bytearray) -> bytearray:
    headers = list(HEADER.finditer(body))
    start = headers[-1].start() if headers else len(body)
    return body[start : start + _HEADER_BYTES]


def _split_nested(lines: Iterator[bytes], opening: bytes, closing: bytes) -> Iterator[Piece | None]:
    """Events of XML and JSON begin at the start of a line and may hold ads in themselves."""
    body, depth, num_found = bytearray(), 0, 0
    for line in lines:
        if line.startswith(opening):
            if body:
                yield None
            body, depth = bytearray(), 0
            num_found += 1
        elif not body:
            continue
        body += line
        bare = _STRING.sub(b"", line) if opening == b"{" else line
        depth += bare.count(opening) - bare.count(closing)
        if depth <= 0 or len(body) > MAX_EVENT_BYTES:
            yield Piece(bytes(body)) if depth <= 0 else None
            body = bytearray()
    if body or not num_found:
        yield None
