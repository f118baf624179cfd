"""A small Pelican director for tests of look-ups: a fake; the real XRootD is in tests/cluster."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from dataset.federation.pelican import DISCOVERY_PATH
from tests.dataset.small_server import Handler, running, serving

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


@contextmanager
def federation(
    caches: Sequence[bytes], origin: bytes | None = None, require_token: bool = False
) -> Iterator[list[str]]:
    """The addresses of a director (a fake), of its caches with what each serves, of its origin."""
    with ExitStack() as stack:

        def serve(number: int, handler: Handler) -> bool:
            handler.content = caches[number]  # as it is now: a test may change it
            return False

        numbers = range(len(caches))
        named = [stack.enter_context(serving(b"", partial(serve, n)))[0] for n in numbers]
        behind = [] if origin is None else [stack.enter_context(serving(origin))[0]]

        def direct(handler: Handler) -> bool:
            path, _, query = handler.path.partition("?")
            if path.startswith("/.well-known/"):
                handler.content = json.dumps({"director_endpoint": place}).encode()
                return False
            found = behind if query == "directread" and behind else named
            links = [f'<{url}>; rel="duplicate"; pri={n}' for n, url in enumerate(found, 1)]
            handler.send_response(307)
            handler.send_header("Link", ", ".join(links))
            required = str(require_token).lower()
            handler.send_header("X-Pelican-Namespace", f"namespace=/, require-token={required}")
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return True

        place = "http://" + urlsplit(stack.enter_context(serving(b"", direct))[0]).netloc
        yield [place, *(f"http://{urlsplit(url).netloc}" for url in [*named, *behind])]
