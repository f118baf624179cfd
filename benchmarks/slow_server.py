#!/usr/bin/env python3
"""A folder behind a slow link: an HTTP server on loopback whose answers share one bandwidth."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dataset.errors import run_command
from dataset.flags import REQUIRED, flag, make_parser, parse_flags

PIECE = 64 * 1024
EXAMPLE = "example:\n  python benchmarks/slow_server.py data --seconds 20 --file big.tar"


@dataclass(frozen=True)
class ServerFlags:
    """The flags of benchmarks/slow_server.py."""

    folder: Path = flag(REQUIRED, "the folder whose files are served", "FOLDER")
    file: str = flag(REQUIRED, "a file in it, which sets the rate of the link")
    seconds: float = flag(20.0, "how long the link takes to carry that file")


class Bandwidth:
    """Lets bytes through at a rate, over all connections together."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at_s = time.monotonic()
        self.num_sent = 0

    def take(self, num_bytes: int) -> None:
        """Returns when the link has carried these bytes."""
        with self._lock:
            self.num_sent += num_bytes
            self._free_at_s = max(self._free_at_s, time.monotonic()) + num_bytes / self._bytes_per_s
            wait_s = self._free_at_s - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)


@dataclass(frozen=True)
class SlowServer:
    """The server's address and what it sent."""

    url: str
    bandwidth: Bandwidth

    def num_sent(self) -> int:
        return self.bandwidth.num_sent


@contextmanager
def serve_folder(folder: Path, bytes_per_s: float) -> Iterator[SlowServer]:
    """Serves the files of a folder, whole or in ranges, until the block ends."""
    bandwidth = Bandwidth(bytes_per_s)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, with_body: bool) -> None:
            path = folder / Path(self.path).name
            if not path.is_file():
                self.send_error(404)
                return
            size = path.stat().st_size
            match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            first = int(match[1]) if match else 0
            last = min(int(match[2]) if match and match[2] else size - 1, size - 1)
            self.send_response(206 if match else 200)
            self.send_header("Content-Length", str(last - first + 1))
            self.send_header("Accept-Ranges", "bytes")
            if match:
                self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
            self.end_headers()
            if with_body:
                try:
                    self._send(path, first, last)
                except ConnectionError:  # a client that has enough closes the connection
                    self.close_connection = True

        def _send(self, path: Path, first: int, last: int) -> None:
            with open(path, "rb") as file:
                file.seek(first)
                left = last - first + 1
                while left > 0:
                    piece = file.read(min(PIECE, left))
                    bandwidth.take(len(piece))
                    self.wfile.write(piece)
                    left -= len(piece)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield SlowServer(f"http://127.0.0.1:{server.server_address[1]}", bandwidth)
    finally:
        server.shutdown()
        server.server_close()


def main() -> int:
    """Serves until it is ended; the first line on stdout is the address."""
    flags = parse_flags(ServerFlags, make_parser(__doc__, EXAMPLE))
    rate = (flags.folder / flags.file).stat().st_size / flags.seconds
    with serve_folder(flags.folder, rate) as server:
        print(server.url, flush=True)
        threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
