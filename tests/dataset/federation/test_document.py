"""Small documents: no answer can hang a look-up, crash it, or carry a secret to another host."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from dataset.federation import connection
from dataset.federation.connection import (
    NETWORK_ERRORS,
    Connection,
    Pool,
    find_place,
    redirect_target,
)
from dataset.federation.document import get_document
from dataset.federation.framing import ProtocolError
from tests.dataset.small_server import Handler, serving

LIMIT_S = 1.0  # of what drips; a busy machine must not look silent in it
PIECES_IN_LIMIT = 20
PATIENT_S = 60.0  # of what answers


def drip(handler: Handler, start: bytes, piece: bytes, sent: list[bytes]) -> bool:
    """Sends one piece at a time, each well within the time limit of a receive."""
    handler.close_connection = True
    try:
        handler.wfile.write(start)
        while True:
            handler.wfile.write(piece)
            sent.append(piece)
            time.sleep(LIMIT_S / PIECES_IN_LIMIT)
    except OSError:
        return True


STARTS = {
    "head": (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
    "body": (b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n", b"x"),
    "body without a length": (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", b"x"),
    "chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
    "size of a chunk": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"x"),
}


@pytest.mark.parametrize("where", STARTS)
def test_a_document_that_drips_ends_in_time(where: str) -> None:
    sent: list[bytes] = []
    with serving(b"", lambda handler: drip(handler, *STARTS[where], sent)) as (url, _):
        with pytest.raises(ProtocolError, match="stalled"):
            get_document(Pool(LIMIT_S), url, {})
        assert len(sent) < 20 * PIECES_IN_LIMIT  # by the server's clock: a busy machine slows both


def test_a_handshake_that_drips_ends_in_time() -> None:
    record = b"\x16\x03\x03\x40\x00\x02\x00\x3f\xfc"  # the start of a long message of TLS

    def serve() -> None:
        with listener.accept()[0] as sock, suppress(OSError):
            sock.sendall(record)
            while True:
                sock.sendall(b"x")
                time.sleep(LIMIT_S / PIECES_IN_LIMIT)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(NETWORK_ERRORS):
            get_document(Pool(LIMIT_S), f"https://127.0.0.1:{listener.getsockname()[1]}/", {})
        thread.join()


def test_a_large_document_may_take_longer_than_the_limit_while_it_flows() -> None:
    piece = b"x" * connection.PIECE_BYTES
    limit_s = 2.0  # so that a pause of a busy machine is not taken for a stall

    def flow(handler: Handler) -> bool:
        handler.send_response(200)
        handler.send_header("Content-Length", str(6 * len(piece)))
        handler.end_headers()
        for _ in range(6):
            handler.wfile.write(piece)
            time.sleep(limit_s / 4)
        return True

    with serving(b"", flow) as (url, _):
        status, _, body, _ = get_document(Pool(limit_s), url, {})
    assert (status, body) == (200, 6 * piece)


def test_a_connection_is_kept_after_a_document() -> None:
    pool = Pool(LIMIT_S)
    with serving(b"abc") as (url, _):
        get_document(pool, url, {})
        first = pool.take(url)
        pool.give(first)
        time.sleep(3 * LIMIT_S)  # the watch is over, and must not cut it
        assert pool.take(url) is first
        pool.give(first)
        assert get_document(pool, url, {})[2] == b"abc"
        pool.close()


def redirect_to(location: Callable[[], str]) -> Callable[[Handler], bool]:
    def misbehave(handler: Handler) -> bool:
        if handler.path != "/object.bin":
            return False
        handler.send_response(301)
        handler.send_header("Location", location())
        handler.send_header("Content-Length", "0")
        handler.end_headers()
        return True

    return misbehave


def test_a_redirect_on_the_same_server_keeps_the_authorization() -> None:
    with serving(b"abc", redirect_to(lambda: "/object.bin/")) as (url, seen):
        get_document(Pool(PATIENT_S), url, {"Authorization": "Bearer x"})
    assert [request.get("authorization") for request in seen] == ["Bearer x", "Bearer x"]


def test_a_redirect_to_another_port_loses_the_authorization() -> None:
    with (
        serving(b"abc") as (other, elsewhere),
        serving(b"", redirect_to(lambda: other)) as (url, seen),
    ):
        get_document(Pool(PATIENT_S), url, {"Authorization": "Bearer x"})
    assert [request.get("authorization") for request in seen] == ["Bearer x"]
    assert [request.get("authorization") for request in elsewhere] == [None]


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("https://[2001:db8::1]/x", ("https", "2001:db8::1", 443)),
        ("http://[fe80::abcd]/x", ("http", "fe80::abcd", 80)),
        ("http://[::1]:8080/x", ("http", "::1", 8080)),
        ("https://host/x", ("https", "host", 443)),
    ],
)
def test_the_port_is_never_looked_for_in_an_ipv6_address(url: str, place: connection.Place) -> None:
    made = Connection(url, 1.0)
    assert made.place == find_place(url) == place
    assert (made._http.host, made._http.port) == place[1:]


@pytest.mark.parametrize("location", ["http://[", "http://a..b/x", "http://h:port/", "ftp://h/x"])
def test_a_broken_redirect_is_a_failure_of_the_server(location: str) -> None:
    with pytest.raises(ProtocolError):
        redirect_target("http://host/x", location)
    with serving(b"", redirect_to(lambda: location)) as (url, _), pytest.raises(ProtocolError):
        get_document(Pool(PATIENT_S), url, {})


@pytest.mark.parametrize("url", ["http://a..b/x", "http://[", "http://host:99999/x"])
def test_an_address_that_cannot_be_asked_is_a_network_error(url: str) -> None:
    with pytest.raises(NETWORK_ERRORS):
        Pool(LIMIT_S).ask("GET", url, {})


def test_a_header_that_cannot_be_sent_is_a_network_error_without_a_traceback() -> None:
    with serving(b"") as (url, _), pytest.raises(NETWORK_ERRORS):
        Pool(PATIENT_S).ask("GET", url, {"Authorization": "Bearer \u20ac"})


def test_a_truncated_document_is_refused() -> None:
    def truncate(handler: Handler) -> bool:
        handler.send_response(200)
        handler.send_header("Content-Length", "10")
        handler.end_headers()
        handler.wfile.write(b"abc")
        handler.close_connection = True
        return True

    with (
        serving(b"", truncate) as (url, _),
        pytest.raises((ProtocolError, http.client.IncompleteRead)),
    ):
        get_document(Pool(PATIENT_S), url, {})
