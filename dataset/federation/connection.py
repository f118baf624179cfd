"""HTTP for transfers: connections are kept open, and can be cut from outside when they stall.

Why not requests or urllib3: the transfer plugin runs with the standard library of a slot's Python
alone, and the supervisor of a transfer must be able to cut a connection in which a thread waits.
"""

from __future__ import annotations

import http.client
import select
import socket
import ssl
import string
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import cast
from urllib.parse import quote, urlsplit

from dataset.federation.framing import (
    ChunkedBody,
    ProtocolError,
    check_head,
    is_chunked,
    read_length,
)
from dataset.federation.pelican import is_address, join_address
from dataset.federation.reach import CONNECT_S, Reach
from dataset.federation.tls import tls_context
from dataset.redaction import redact

USER_AGENT = "trainyard-fetch/1"
MAX_REDIRECTS = 5
MAX_DOCUMENT = 64 << 20  # a listing of a large collection; discovery and director answers are tiny
PIECE_BYTES = 16 << 10  # of a document: less than this within the time limit counts as stalled
DEFAULT_PORTS = {"http": 80, "https": 443}
REDIRECTS = (301, 302, 303, 307, 308)
# What may go wrong on the way to a server; all of it is a temporary failure.
NETWORK_ERRORS = (OSError, http.client.HTTPException, ssl.SSLError)


Place = tuple[str, str, int]  # scheme, host, port


def find_place(url: str) -> Place:
    """The server of an address; the port is always given, or http.client looks for one in IPv6."""
    if not is_address(url):
        raise ProtocolError(f"{redact(url)!r} is not an address")
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or DEFAULT_PORTS[parts.scheme]


class _Response(http.client.HTTPResponse):
    """Skips 102 and 103 as http.client skips 100: the answer follows them (RFC 9110, 15.2)."""

    def _read_status(self) -> tuple[str, int, str]:
        version, status, reason = super()._read_status()  # type: ignore[misc]
        return version, http.client.CONTINUE if 102 <= status < 200 else status, reason


class Connection:
    """One TCP connection to a server; `cut` may be called from any thread and never blocks."""

    def __init__(self, url: str, timeout_s: float, reach: Reach | None = None) -> None:
        self.place = find_place(url)
        scheme, host, port = self.place
        connect_s = min(CONNECT_S, timeout_s)
        if scheme == "https":
            self._http: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, port, timeout=connect_s, context=tls_context()
            )
        else:
            self._http = http.client.HTTPConnection(host, port, timeout=connect_s)
        self._http.response_class = _Response
        if reach is not None:
            self._http._create_connection = reach.connect  # type: ignore[attr-defined]
        self._timeout_s = timeout_s
        self.was_used = False
        self._sock: socket.socket | None = None
        self._cut = False

    def request(self, method: str, url: str, headers: Mapping[str, str]) -> Answer:
        """Sends one request and reads the head of its answer."""
        try:
            return self._request(method, url, headers)
        except NETWORK_ERRORS:
            raise
        except ValueError as error:  # of an address or a header that cannot be sent
            raise ProtocolError(redact(str(error))) from None

    def _request(self, method: str, url: str, headers: Mapping[str, str]) -> Answer:
        if self._http.sock is None:
            self._http.connect()  # its time limit is one for the whole handshake
            self._sock = sock = cast(socket.socket, self._http.sock)
            sock.settimeout(self._timeout_s)
        if self._cut:
            raise ProtocolError("the connection was cut")
        parts = urlsplit(url)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        path = quote(path, safe=string.punctuation)  # a server's redirect may hold anything
        self._http.request(method, path, headers={"User-Agent": USER_AGENT, **headers})
        return Answer(self, self._http.getresponse(), url)

    @property
    def is_quiet(self) -> bool:
        """Whether the connection is open and idle, so that it can take another request."""
        sock = self._http.sock
        if sock is None or self._cut:
            return False
        if isinstance(sock, ssl.SSLSocket) and sock.pending():
            return False
        with suppress(OSError, ValueError):
            return not select.select([sock], [], [], 0)[0]
        return False

    @property
    def was_cut(self) -> bool:
        return self._cut

    def cut(self) -> None:
        """Closes the connection while another thread waits in it."""
        self._cut = True
        # http.client forgets the socket of an answer that ends with the connection; we do not.
        if self._sock is not None:
            with suppress(OSError):
                # Not the TLS socket's own method: it destroys the session that the reader uses.
                socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._http.close()


class Answer:
    """The head of an answer, and its body on demand."""

    def __init__(
        self, connection: Connection, response: http.client.HTTPResponse, url: str
    ) -> None:
        self.connection = connection
        self.url = url
        check_head(response.headers.defects)
        self.status = response.status
        self.headers: dict[str, str] = {}
        for name, value in response.getheaders():  # a repeated one goes on in the same list
            before = self.headers.get(name.lower())
            self.headers[name.lower()] = f"{before}, {value}" if before else value
        self._response = response
        self._chunks: ChunkedBody | None = None
        self.length = read_length(self.headers)
        if is_chunked(self.headers):
            self.length = None  # of the two, chunks count
            self._chunks = ChunkedBody(response.fp) if response.fp is not None else None
        elif response.length == 0:  # to HEAD, or a status without a body
            self.length = 0

    def readinto(self, view: memoryview) -> int:
        """Bytes of one receive into the view; 0 at the end. Returns early rather than waiting."""
        if self._chunks is not None:
            return self._chunks.readinto(view)
        if self._response.fp is None:
            return 0
        # HTTPResponse.readinto waits until the view is full, which would hide a stall.
        return self._response.fp.readinto1(view)

    def read_all(self, on_piece: Callable[[], None] = lambda: None) -> bytes:
        """The whole body of a small document; `on_piece` is called for every 16 KiB of it."""
        body = bytearray()
        while piece := self._read_piece():
            body += piece
            on_piece()
            if len(body) > MAX_DOCUMENT:
                raise ProtocolError(f"an answer of more than {MAX_DOCUMENT >> 20} MiB")
        if self.length is not None and len(body) != self.length:
            raise ProtocolError(f"the answer ended after {len(body)} of {self.length} bytes")
        return bytes(body)

    def _read_piece(self) -> bytes:
        """The next 16 KiB; less at the end of the body alone."""
        if self._chunks is None:
            return self._response.read(PIECE_BYTES)
        piece, filled = memoryview(bytearray(PIECE_BYTES)), 0
        while filled < len(piece) and (got := self._chunks.readinto(piece[filled:])):
            filled += got
        return bytes(piece[:filled])

    def release(self, received: int) -> bool:
        """Ends the answer after `received` bytes; True when its connection can be used again."""
        whole = self.length is not None and received == self.length
        keep = whole and not self._response.will_close
        self._response.close()
        return keep and self.connection.is_quiet


class Pool:
    """Idle connections by place, shared by all threads of a transfer."""

    def __init__(self, timeout_s: float, reach: Reach | None = None) -> None:
        self.timeout_s = timeout_s
        self.reach = reach
        self._idle: dict[Place, list[Connection]] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def take(self, url: str) -> Connection:
        place = find_place(url)
        with self._lock:
            kept = self._idle.get(place, [])
            while kept:
                connection = kept.pop()
                if connection.is_quiet:
                    return connection
                connection.close()
        return Connection(url, self.timeout_s, self.reach)

    def ask(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        hold: Callable[[Connection], None] = lambda connection: None,
    ) -> Answer:
        """The head of an answer. A server may close a kept connection just as it is used again:
        that is no failure of the server, and the request goes out once more on a new one."""
        while True:
            connection = self.take(url)
            hold(connection)
            try:
                return connection.request(method, url, headers)
            except NETWORK_ERRORS as error:
                connection.close()
                is_stale = isinstance(error, (ConnectionError, http.client.RemoteDisconnected))
                if not (connection.was_used and is_stale and not connection.was_cut):
                    raise

    def give(self, connection: Connection) -> None:
        connection.was_used = True
        with self._lock:
            if self._is_closed:
                connection.close()
            else:
                self._idle.setdefault(connection.place, []).append(connection)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for kept in self._idle.values():
                for connection in kept:
                    connection.close()
            self._idle.clear()


def redirect_target(url: str, location: str) -> str:
    """Where a Location leads; only http and https are followed, and never from https to http."""
    target = join_address(url, location)
    if target is None:
        raise ProtocolError(f"a redirect to {redact(location)!r} is not followed")
    if url.startswith("https:") and not target.startswith("https:"):
        raise ProtocolError(f"a redirect from https to {redact(target)!r} is not followed")
    return target


def explain(error: BaseException) -> str:
    """A failure in a few words without secrets, for counters and messages."""
    if isinstance(error, socket.gaierror):
        return "name not found"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate not accepted ({error.verify_message})"
    if isinstance(error, http.client.HTTPException):
        return f"broken answer ({type(error).__name__})"
    text = redact(error.strerror or str(error) if isinstance(error, OSError) else str(error))
    return text or type(error).__name__
