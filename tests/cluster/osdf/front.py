"""The process in front of the XRootDs: directors, fault proxies, and the port that commands them.

Started by service.py as `python -m tests.cluster.osdf.front FOLDER BASE_PORT`; prints `ready` when
it listens.
"""

from __future__ import annotations

import json
import ssl
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

from tests.cluster.osdf.certificates import TokenCheck
from tests.cluster.osdf.director import DirectorHandler, Place
from tests.cluster.osdf.faulty import FaultyServer, Shared
from tests.cluster.osdf.layout import HOST, SERVERS, Layout
from tests.cluster.osdf.proxy import ProxyHandler
from tests.cluster.osdf.rules import Fault, Faults
from tests.cluster.osdf.traffic import Traffic


class ControlHandler(BaseHTTPRequestHandler):
    """JSON in, JSON out: the functions of service.py call it."""

    shared: ClassVar[Shared]
    tokens: ClassVar[TokenCheck]

    def do_GET(self) -> None:
        query = {k: v[0] for k, v in parse_qs(urlsplit(self.path).query).items()}
        name = urlsplit(self.path).path
        if name == "/health":
            self._reply({"ok": True})
        elif name == "/traffic":
            self._reply(self.shared.traffic.select(query["path"], query["server"]))
        else:
            self._reply({"error": f"unknown: {name}"}, 404)

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            self._reply(self._obey(urlsplit(self.path).path, json.loads(content)))
        except (KeyError, TypeError, ValueError) as error:
            self._reply({"error": f"{type(error).__name__}: {error}"}, 400)

    def _obey(self, name: str, order: dict[str, Any]) -> Any:
        if name == "/faults/add":
            faults = [Fault(**fields) for fields in order["faults"]]
            return self.shared.faults.add(order["name"], faults, order["seed"])
        if name == "/faults/hits":
            return self.shared.faults.hits(order["name"])
        if name == "/faults/remove":
            return self.shared.faults.remove(order["name"])
        if name == "/traffic/forget":
            return self.shared.traffic.forget(order["path"])
        if name == "/tokens/revoke":
            return self.tokens.revoked.add(order["token"])
        raise ValueError(f"unknown order {name}")

    def _reply(self, content: Any, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""


def make_servers(layout: Layout) -> list[ThreadingHTTPServer]:
    """Every listener of this process, bound."""
    shared = Shared(Faults(), Traffic())
    tokens = TokenCheck(layout.certificates)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(layout.certificates / "server.pem")
    common: dict[str, Any] = {"shared": shared, "tokens": tokens}
    servers: list[ThreadingHTTPServer] = [
        ThreadingHTTPServer((HOST, layout.control_port), type("Control", (ControlHandler,), common))
    ]
    for scheme in ("http", "https"):
        context = tls if scheme == "https" else None
        for bare in (False, True):
            place = Place(layout, scheme, bare)
            handler = type("D", (DirectorHandler,), {**common, "scheme": scheme, "place": place})
            port = layout.director_port(scheme, bare)
            servers.append(FaultyServer((HOST, port), handler, context))
        for server in SERVERS:
            own = {"server_name": server, "upstream_port": layout.http_port(server)}
            handler = type("P", (ProxyHandler,), {**common, "scheme": scheme, **own})
            port = layout.proxy_port(server, scheme)
            servers.append(FaultyServer((HOST, port), handler, context))
    return servers


def main() -> None:
    servers = make_servers(Layout(Path(sys.argv[1]), int(sys.argv[2])))
    threads = [threading.Thread(target=server.serve_forever, daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    print("ready", flush=True)
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
