"""Bodies of hostile servers: framing is never stored as bytes of the object, nor a crash."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dataset.errors import CommandError, PassingError
from dataset.federation.connection import Pool
from dataset.federation.document import get_document
from dataset.federation.framing import ProtocolError
from dataset.federation.lookup import Options
from dataset.transfer.journal import CHUNK
from tests.dataset.object_fetch import fetch
from tests.dataset.small_server import Handler, serving

CONTENT = os.urandom(2 * CHUNK + 77)
QUICK = Options(stall_s=1.0, give_up_s=1.0, missing_s=0.5, connections=2)


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that failed is asked again at once."""
    monkeypatch.setattr("dataset.federation.servers.BACKOFF_S", 0.01)


def asked_range(handler: Handler) -> tuple[int, int]:
    match = re.match(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", ""))
    if match is None:
        return 0, len(CONTENT)
    return int(match[1]), min(int(match[2]) + 1, len(CONTENT))


def chunk(data: bytes, size: str | None = None) -> bytes:
    return f"{size or f'{len(data):x}'}\r\n".encode() + data + b"\r\n"


def answer(handler: Handler, headers: str, body: bytes, status: str = "206 Partial") -> bool:
    """Sends what a server never should; {first}, {last}, {size} and {length} are the true ones."""
    first, end = asked_range(handler)
    text = headers.format(first=first, last=end - 1, size=len(CONTENT), length=len(body))
    handler.wfile.write(f"HTTP/1.1 {status}\r\n{text}\r\n".encode("latin-1") + body)
    handler.close_connection = True
    return True


RANGE = "Content-Range: bytes {first}-{last}/{size}\r\n"
CHUNKED = RANGE + "Transfer-Encoding: chunked\r\n"
# What a server does to a range of the object: (headers, how it frames the bytes).
BAD_FRAMES: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip, chunked": (RANGE + "Transfer-Encoding: gzip, chunked\r\n", chunk),
    "chunked twice": (CHUNKED + "Transfer-Encoding: chunked\r\n", chunk),
    "an unknown encoding": (RANGE + "Transfer-Encoding: xchunked\r\n", chunk),
    "a space before a colon": (RANGE + "Transfer-Encoding : chunked\r\n", chunk),
    "a line without a colon": (RANGE + "and\r\nTransfer-Encoding: chunked\r\n", chunk),
    "a NUL in a name": (RANGE + "Transfer-Encoding\0: chunked\r\n", chunk),
    "a header in two lines": (RANGE + "Transfer-Encoding: gzip,\r\n chunked\r\n", chunk),
    "a parameter": (RANGE + "Transfer-Encoding: chunked;q=1\r\n", chunk),
    "more headers than anybody sends": (RANGE + "X: y\r\n" * 200, lambda data: data),
    "two ranges": (RANGE * 2 + "Content-Length: {length}\r\n", bytes.swapcase),
    "a negative chunk": (CHUNKED, lambda data: chunk(data, "-3")),
    "a chunk size with a sign": (CHUNKED, lambda data: chunk(data, f"+{len(data):x}")),
    "a chunk size with 0x": (CHUNKED, lambda data: chunk(data, f"0x{len(data):x}")),
    "a chunk size of 5000 digits": (CHUNKED, lambda data: chunk(data, "9" * 5000)),
    "an empty chunk size": (CHUNKED, lambda data: b"\r\n" + data),
    "chunks that are none": (CHUNKED, lambda data: data),
    "two lengths": (RANGE + "Content-Length: {length}\r\nContent-Length: 5\r\n", lambda data: data),
    "a negative length": (RANGE + "Content-Length: -{length}\r\n", lambda data: data),
    "a length with a sign": (RANGE + "Content-Length: +{length}\r\n", lambda data: data),
    "a length of ²": (RANGE + "Content-Length: ²\r\n", lambda data: data),
    "a length of 5000 digits": (RANGE + f"Content-Length: {'9' * 5000}\r\n", lambda data: data),
    "a range of 5000 digits": (
        f"Content-Range: bytes {{first}}-{{last}}/{'9' * 5000}\r\nContent-Length: {{length}}\r\n",
        lambda data: data,
    ),
    "an empty object": (
        "Content-Range: bytes {first}-{last}/0\r\nContent-Length: {length}\r\n",
        lambda data: data,
    ),
    "several parts": (
        RANGE + "Content-Type: multipart/byteranges; boundary=x\r\nContent-Length: {length}\r\n",
        lambda data: data,
    ),
    "gzip": (RANGE + "Content-Encoding: gzip\r\nContent-Length: {length}\r\n", lambda data: data),
    "no byte of the range": (RANGE + "Content-Length: 0\r\n", lambda data: b""),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_a_broken_answer_is_asked_for_again(name: str, tmp_path: Path) -> None:
    headers, frame = BAD_FRAMES[name]
    num_asked = {"size": 0, "bytes": 0}

    def misbehave(handler: Handler) -> bool:
        """The first answer of both kinds is broken."""
        start, end = asked_range(handler)
        kind = "size" if end - start == 1 else "bytes"
        num_asked[kind] += 1
        return num_asked[kind] == 1 and answer(handler, headers, frame(CONTENT[start:end]))

    with serving(CONTENT, misbehave) as (url, _):
        fetch(url, tmp_path)
    assert (tmp_path / "object.bin").read_bytes() == CONTENT
    assert min(num_asked.values()) >= 2


def test_a_server_that_only_sends_broken_answers_leaves_no_file(tmp_path: Path) -> None:
    headers, frame = BAD_FRAMES["gzip, chunked"]

    def misbehave(handler: Handler) -> bool:
        start, end = asked_range(handler)
        return answer(handler, headers, frame(CONTENT[start:end]))

    with (
        serving(CONTENT, misbehave) as (url, _),
        pytest.raises(PassingError, match="Transfer-Encoding 'gzip, chunked'"),
    ):
        fetch(url, tmp_path, QUICK)
    assert not (tmp_path / "object.bin").exists()


WHOLE_ANSWERS = {
    "200 with the range that was asked for": ("200 OK", RANGE + "Content-Length: {length}\r\n"),
    "416 for the first byte": (
        "416 No",
        "Content-Range: bytes */50\r\nContent-Length: {length}\r\n",
    ),
    "416 of an absurd size": ("416 No", f"Content-Range: bytes */{'9' * 5000}\r\n"),
}


@pytest.mark.parametrize("name", WHOLE_ANSWERS)
def test_an_answer_that_contradicts_itself_tells_no_size(name: str, tmp_path: Path) -> None:
    status, headers = WHOLE_ANSWERS[name]

    def misbehave(handler: Handler) -> bool:
        start, end = asked_range(handler)
        return end - start == 1 and answer(handler, headers, CONTENT[start:end], status)

    with serving(CONTENT, misbehave) as (url, _), pytest.raises(CommandError) as caught:
        fetch(url, tmp_path, QUICK)
    assert caught.value.exit_code == 75
    assert not (tmp_path / "object.bin").exists()


@pytest.mark.parametrize("more", ["", "Content-Length: 5\r\n"], ids=["", "and a length"])
def test_chunks_with_extensions_and_trailers_are_read(more: str, tmp_path: Path) -> None:
    def misbehave(handler: Handler) -> bool:
        start, end = asked_range(handler)
        data = CONTENT[start:end]
        size = f"{len(data[:1000]):X} ;name=value"
        body = chunk(data[:1000], size) + (chunk(data[1000:]) if data[1000:] else b"")
        return answer(handler, CHUNKED + more, body + b"0\r\nX-Trailer: 1\r\n\r\n")

    with serving(CONTENT, misbehave) as (url, _):
        fetch(url, tmp_path)
    assert (tmp_path / "object.bin").read_bytes() == CONTENT


BAD_DOCUMENTS = {
    "cut": b"Content-Length: 9\r\n\r\nabc",
    "gzip": b"Transfer-Encoding: gzip, chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    "negative": b"Transfer-Encoding: chunked\r\n\r\n-3\r\nabc\r\n0\r\n\r\n",
    "no end": b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
    "long chunk": b"Transfer-Encoding: chunked\r\n\r\n3\r\nabcdef\r\n0\r\n\r\n",
    "endless trailers": b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: y\r\n" * 1000,
}


@pytest.mark.parametrize("name", BAD_DOCUMENTS)
def test_a_document_with_broken_framing_is_refused(name: str) -> None:
    def misbehave(handler: Handler) -> bool:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n" + BAD_DOCUMENTS[name])
        handler.close_connection = True
        return True

    with serving(b"", misbehave) as (url, _), pytest.raises(ProtocolError):
        get_document(Pool(2.0), url, {})


def test_a_document_in_chunks_is_read_whole() -> None:
    def misbehave(handler: Handler) -> bool:
        body = b"".join(chunk(bytes([n])) for n in range(200)) + b"0\r\n\r\n"
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
        return True

    pool = Pool(2.0)
    with serving(b"", misbehave) as (url, _):
        for _ in range(2):  # the second on the kept connection
            assert get_document(pool, url, {})[2] == bytes(range(200))
        pool.close()


@pytest.mark.parametrize("status", ["100 Continue", "102 Processing", "103 Early Hints"])
def test_what_comes_before_an_answer_is_passed_over(status: str, tmp_path: Path) -> None:
    def misbehave(handler: Handler) -> bool:
        handler.wfile.write(f"HTTP/1.1 {status}\r\nLink: </x>\r\n\r\n".encode() * 3)
        return False

    with serving(CONTENT, misbehave) as (url, _):
        fetch(url, tmp_path)
    assert (tmp_path / "object.bin").read_bytes() == CONTENT
