"""An HTTP server whose answers suffer the faults that are set, and that counts what it sent."""

from __future__ import annotations

import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

from tests.cluster.osdf import bodies
from tests.cluster.osdf.answers import Answer, fault_answer, set_headers
from tests.cluster.osdf.rules import Faults, Request, Strike
from tests.cluster.osdf.traffic import Entry, Traffic


class FaultyServer(ThreadingHTTPServer):
    """A threaded server on loopback, with or without TLS."""

    daemon_threads = True
    request_queue_size = 512
    allow_reuse_address = True

    def __init__(
        self,
        address: tuple[str, int],
        handler: Callable[..., BaseHTTPRequestHandler],
        tls: ssl.SSLContext | None,
    ) -> None:
        super().__init__(address, handler)
        self.tls = tls

    def finish_request(self, request: Any, client_address: Any) -> None:
        if self.tls is None:
            super().finish_request(request, client_address)
            return
        request.settimeout(10)  # a handshake that never ends must not hold its thread
        try:
            wrapped = self.tls.wrap_socket(request, server_side=True)
        except OSError:
            return
        wrapped.settimeout(None)
        try:
            super().finish_request(wrapped, client_address)
        finally:
            self.shutdown_request(wrapped)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves in the middle is everyday life here."""


@dataclass(frozen=True)
class Shared:
    """What all servers of one process share."""

    faults: Faults
    traffic: Traffic
    link: bodies.Pace = field(default_factory=lambda: bodies.Pace(most_bytes=bodies.LINK_BYTES))


class FaultyHandler(BaseHTTPRequestHandler):
    """Reads requests, asks `answer` for the response, and sends it through the faults."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server_name: ClassVar[str]
    scheme: ClassVar[str]
    shared: ClassVar[Shared]

    def answer(self, path: str, strikes: dict[str, Strike]) -> Answer:
        """The right response to the request at hand; subclasses say what it is."""
        raise NotImplementedError

    def object_path(self, path: str) -> str:
        """The path of the object that the request is about."""
        return path

    def setup(self) -> None:
        super().setup()
        self.is_first = True
        self.pace = bodies.Pace()

    def handle_request(self) -> None:
        split = urlsplit(self.path)
        path = self.object_path(unquote(split.path))
        request = Request(self.server_name, self.command, path, self.headers.get("Range") or "")
        strikes = self.shared.faults.draw(request)
        self.entry = Entry(
            **request.__dict__,
            scheme=self.scheme,
            token=self._where_token_is(split.query),
            faults=sorted(strikes),
            connection=f"{self.client_address[1]}",
        )
        self.shared.traffic.add(self.entry)
        try:
            self._delay(strikes.get("wan"))
            self._delay(strikes.get("link"))
            if not self._strike_before_answer(strikes):
                self._send(self.answer(path, strikes), strikes)
        except OSError:
            self.close_connection = True
        finally:
            self.entry.ended_s = time.time()
            self.is_first = False

    do_GET = do_HEAD = do_PROPFIND = do_OPTIONS = do_PUT = handle_request

    def token(self) -> str | None:
        """The bearer token of the request, from its header or its query."""
        header = self.headers.get("Authorization") or ""
        query = parse_qs(urlsplit(self.path).query).get("authz", [""])[0]
        return (header.removeprefix("Bearer ") or query.removeprefix("Bearer ")) or None

    def _where_token_is(self, query: str) -> str:
        if self.headers.get("Authorization"):
            return "header"
        return "query" if "authz=" in query else ""

    def _delay(self, wan: Strike | None) -> None:
        if wan is None:
            return
        if wan.fault.kind == "link":
            self.pace = self.shared.link
        self.pace.bytes_per_s = wan.fault.bytes_per_s
        # The kernel's handshakes on loopback took no time: the first answer pays for TCP (and TLS).
        round_trips = 1 + (1 + (self.scheme == "https") if self.is_first else 0)
        time.sleep(round_trips * wan.fault.delay_s)

    def _strike_before_answer(self, strikes: dict[str, Strike]) -> bool:
        """Whether a fault took the place of the answer."""
        hang = strikes.get("hang")
        gave_up = hang is not None and not self.wait(hang.fault.seconds, hang.over)
        if gave_up or "close" in strikes:
            self.close_connection = True
            return True
        for kind in ("status", "ingress", "loop"):
            if kind in strikes:
                self._send(fault_answer(strikes[kind].fault, self.path), {})
                return True
        return False

    def _send(self, answer: Answer, strikes: dict[str, Strike]) -> None:
        body = bodies.Body(answer.readinto, answer.length)
        _, start, total = bodies.parse_content_range(answer.headers.get("Content-Range"))
        if "flip" in strikes:
            body = bodies.flip(body, strikes["flip"], start)
        if "wrong_range" in strikes and "Content-Range" in answer.headers:
            what = strikes["wrong_range"].fault.what
            if what == "body":
                body = bodies.rotate(body)
            answer.headers["Content-Range"] = bodies.lie(start, answer.length, total, what)
        if "extend" in strikes:
            body = bodies.extend(body, strikes["extend"].fault.extra_bytes)
        if "headers" in strikes:
            set_headers(answer.headers, strikes["headers"].fault.set_headers)
        self._send_head(answer, body.length)
        if self.command != "HEAD" and not self._send_body(body, strikes):
            self.close_connection = True

    def _send_head(self, answer: Answer, length: int) -> None:
        self.entry.status = answer.status
        self.send_response_only(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if "Content-Length" not in answer.headers:
            self.send_header("Content-Length", str(length))
        if answer.close:
            self.send_header("Connection", "close")
        self.end_headers()

    def _send_body(self, body: bodies.Body, strikes: dict[str, Strike]) -> bool:
        """Whether the whole body went out and the connection can go on."""
        kinds = [kind for kind in ("stall", "drip", "truncate", "reset") if kind in strikes]
        strike = strikes[kinds[0]] if kinds else None
        before = body.length if strike is None else strike.offset(body.length)
        if not self._copy(body, before, self.pace):
            return False
        if strike is None:
            return True
        kind, fault = strike.fault.kind, strike.fault
        if kind == "reset":
            self._reset()
        if kind in ("truncate", "reset"):
            return False
        if kind == "stall" and not self.wait(fault.seconds, strike.over):
            return False
        pace = bodies.Pace(fault.bytes_per_s) if kind == "drip" else self.pace
        return self._copy(body, body.length - before, pace, strike.over)

    def _copy(
        self,
        body: bodies.Body,
        num_bytes: int,
        pace: bodies.Pace,
        over: threading.Event | None = None,
    ) -> bool:
        buffer = memoryview(bytearray(min(bodies.BUFFER_BYTES, max(num_bytes, 1))))
        while num_bytes > 0:
            if over is not None and over.is_set():  # a withdrawn drip sends the rest at once
                pace = self.pace
            got = body.readinto(buffer[: min(num_bytes, pace.piece_bytes)])
            if got == 0:
                return False
            self.entry.bytes += got  # before: who has the bytes may ask for the count at once
            self.connection.sendall(buffer[:got])
            num_bytes -= got
            pause_s = pace.pause_s(got)
            if num_bytes == 0:  # a client that has it all may ask for more while the link is busy
                time.sleep(max(0.0, pause_s))
                return True
            went_on = pause_s <= 0 or self.wait(pause_s, over)
            if not went_on and (over is None or not over.is_set()):
                return False  # the client left
        return True

    def wait(self, seconds: float | None, over: threading.Event | None) -> bool:
        """Waits; False when the client left or the fault was withdrawn meanwhile."""
        deadline_s = None if seconds is None else time.monotonic() + seconds
        client = select.poll()
        client.register(self.connection, select.POLLIN)
        while over is None or not over.is_set():
            left_s = 0.2 if deadline_s is None else min(0.2, deadline_s - time.monotonic())
            if left_s <= 0:
                return True
            if client.poll(1000 * left_s):
                return False  # a client that waits for its answer only speaks to hang up
        return False

    def _reset(self) -> None:
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        os.close(self.connection.detach())

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: the traffic is the log."""
