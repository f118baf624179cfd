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


def request(
    url: str,
    method: str = "GET",
    headers: dict[str, str] | None = None,
    ca: Path | None = None,
    timeout_s: float = 20.0,
) -> Response:
    """The response to one request; raises what http.client and the socket raise."""
    split = urlsplit(url)
    netloc = split.netloc
    connection: http.client.HTTPConnection
    if split.scheme == "https":
        context = ssl.create_default_context(cafile=ca)
        connection = http.client.HTTPSConnection(netloc, timeout=timeout_s, context=context)
    else:
        connection = http.client.HTTPConnection(netloc, timeout=timeout_s)
    try:
        target = split.path + (f"?{split.query}" if split.query else "")
        connection.request(method, target, headers=headers or {})
        answer = connection.getresponse()
        names = {name.lower(): value for name, value in answer.getheaders()}
        return Response(answer.status, names, answer.read())
    finally:
        connection.close()
