"""The fault proxy in front of one XRootD: forwards requests, and guards the protected namespace."""

from __future__ import annotations

import http.client
from typing import ClassVar
from urllib.parse import quote, urlsplit

from tests.cluster.osdf.answers import Answer, bytes_answer
from tests.cluster.osdf.certificates import TokenCheck
from tests.cluster.osdf.faulty import FaultyHandler
from tests.cluster.osdf.layout import HOST, PROTECTED
from tests.cluster.osdf.rules import Strike

# Of one connection, or ours to answer for: not passed on.
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "upgrade", "host"}


class ProxyHandler(FaultyHandler):
    """Answers with what the XRootD behind it answers, on a connection of its own per client."""

    upstream_port: ClassVar[int]
    tokens: ClassVar[TokenCheck]

    def setup(self) -> None:
        super().setup()
        self._upstream: http.client.HTTPConnection | None = None

    def finish(self) -> None:
        if self._upstream is not None:
            self._upstream.close()
        super().finish()

    def answer(self, path: str, strikes: dict[str, Strike]) -> Answer:
        if path == PROTECTED or path.startswith(PROTECTED + "/"):
            reason = self.tokens.refuse(self.token(), path)
            if reason:
                return bytes_answer(403, f"{reason}\n".encode(), {"Server": "XrootD/v5.5.3"})
        if self.command == "PUT":
            return bytes_answer(405, b"read only\n", {"Server": "XrootD/v5.5.3"})
        target = quote(strikes["change"].fault.to) if "change" in strikes else None
        answer = self._ask(target or urlsplit(self.path).path, "ignore_range" in strikes)
        return self._pass_on(answer)

    def _ask(self, target: str, drop_range: bool) -> http.client.HTTPResponse:
        dropped = {*_HOP_BY_HOP, "authorization", "range" if drop_range else "host"}
        headers = {k: v for k, v in self.headers.items() if k.lower() not in dropped}
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0)) or None
        # XRootD may have closed an idle connection: the second try is on a new one.
        for _ in range(2):
            if self._upstream is None:
                self._upstream = http.client.HTTPConnection(HOST, self.upstream_port, timeout=60)
            try:
                self._upstream.request(self.command, target, content, headers)
                return self._upstream.getresponse()
            except (http.client.HTTPException, OSError):
                self._upstream.close()
                self._upstream = None
        raise ConnectionError(f"no answer from XRootD on port {self.upstream_port}")

    def _pass_on(self, answer: http.client.HTTPResponse) -> Answer:
        headers = {k: v for k, v in answer.getheaders() if k.lower() not in _HOP_BY_HOP}
        if answer.will_close:
            self._drop_upstream_after(answer)
        if answer.length is None:  # chunked, such as a listing: small
            content = answer.read()
            return bytes_answer(answer.status, content, headers)
        if self.command == "HEAD":
            answer.close()
            return Answer(answer.status, headers, close=answer.will_close)
        headers.pop("Content-Length", None)
        return Answer(answer.status, headers, answer.length, answer.readinto, answer.will_close)

    def _drop_upstream_after(self, answer: http.client.HTTPResponse) -> None:
        self._upstream = None  # the response keeps its own handle on the socket

    def handle_one_request(self) -> None:
        super().handle_one_request()
        if self.close_connection and self._upstream is not None:
            self._upstream.close()
            self._upstream = None
