"""A plain HTTP client for the tests of the mini-OSDF: one request, no redirect, no retry."""

from __future__ import annotations

import http.client
import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Response:
    """What came back; `headers` has lower-case names."""

    status: int
    headers: dict[str, str]
    content: bytes


def connect(url: str, ca: Path | None, timeout_s: float) -> http.client.HTTPConnection:
    """A connection to the server of a URL."""
    split = urlsplit(url)
    if split.scheme == "http":
        return http.client.HTTPConnection(split.netloc, timeout=timeout_s)
    trust = ssl.create_default_context(cafile=ca)
    return http.client.HTTPSConnection(split.netloc, timeout=timeout_s, context=trust)


def request(
    url: str,
    method: str = "GET",
    headers: dict[str, str] | None = None,
    ca: Path | None = None,
    timeout_s: float = 20.0,
) -> Response:
    """The response to one request; raises what http.client and the socket raise."""
    split = urlsplit(url)
    connection = connect(url, ca, timeout_s)
    try:
        target = split.path + (f"?{split.query}" if split.query else "")
        connection.request(method, target, headers=headers or {})
        answer = connection.getresponse()
        names = {name.lower(): value for name, value in answer.getheaders()}
        return Response(answer.status, names, answer.read())
    finally:
        connection.close()
