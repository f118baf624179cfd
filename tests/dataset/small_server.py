"""A small HTTP origin for tests of the engine: a fake; the real XRootD is in tests/cluster."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar


class Handler(BaseHTTPRequestHandler):
    """Serves one object with ranges; `misbehave` may take over a request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each answer on a kept connection waits for 40 ms
    content = b""
    misbehave: Callable[[Handler], bool] = staticmethod(lambda handler: False)
    seen: ClassVar[list[dict[str, str]]] = []

    def do_GET(self) -> None:
        self.seen.append({"path": self.path, **{k.lower(): v for k, v in self.headers.items()}})
        if not self.misbehave(self):
            self.serve()

    def do_HEAD(self) -> None:
        self.send_response(405)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def serve(self) -> None:
        match = re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        body = self.content
        if match and len(body):
            start, end = int(match[1]), min(int(match[2]) + 1, len(body))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(body)}")
            body = body[start:end]
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def running(handler: type[Handler], host: str = "127.0.0.1", **fields: object) -> Iterator[str]:
    """The address of a server on loopback whose handlers have these fields."""
    server = ThreadingHTTPServer((host, 0), type("Bound", (handler,), fields))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://{host}:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def serving(
    content: bytes, misbehave: Callable[[Handler], bool] = lambda handler: False
) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """(address, the requests so far) of an object on loopback."""
    seen: list[dict[str, str]] = []
    with running(Handler, content=content, misbehave=staticmethod(misbehave), seen=seen) as url:
        yield f"{url}/object.bin", seen
