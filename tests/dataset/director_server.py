"""A small Pelican director for tests of look-ups: a fake; the real XRootD is in tests/cluster."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dataset.federation.pelican import DISCOVERY_PATH
from tests.dataset.small_server import Handler, running

Decision = tuple[int, dict[str, str]]


class DirectorHandler(Handler):
    """Names itself in the discovery; `decide` gives the status and the headers of other answers."""

    decide: Callable[[Any], Decision]
    server_version, sys_version = "pelican/7.19.1", ""

    def do_GET(self) -> None:
        if self.path == DISCOVERY_PATH:
            director = f"http://{self.headers['Host']}"
            self._answer(200, {}, json.dumps({"director_endpoint": director}).encode())
        else:
            self._answer(*self.decide(self), b"")

    do_PROPFIND = do_HEAD = do_GET

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.server_version = headers.pop("Server", self.server_version)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def name_source(url: str) -> Decision:
    """The answer that names one source."""
    return 307, {"Location": url, "X-Pelican-Namespace": "namespace=/ns, require-token=false"}


@contextmanager
def directing(decide: Callable[[Any], Decision]) -> Iterator[str]:
    """The address of a federation on loopback."""
    with running(DirectorHandler, decide=staticmethod(decide)) as url:
        yield url
