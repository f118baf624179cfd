"""The mini-director: the part of a Pelican federation that tells a client where an object lies."""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar
from urllib.parse import parse_qs, quote, urlencode, urlsplit

from tests.cluster.osdf.answers import Answer, bytes_answer
from tests.cluster.osdf.certificates import TokenCheck
from tests.cluster.osdf.faulty import FaultyHandler
from tests.cluster.osdf.layout import CACHES, HOST, NAMESPACES, PROTECTED, Layout
from tests.cluster.osdf.rules import Strike

API = "/api/v1.0/director/"
MAX_LINKS = 6  # a real director names no more
SERVER = "pelican/7.0.0-mini"  # a real director's Server header starts the same way


@dataclass(frozen=True)
class Place:
    """Which of its faces the director shows: by which scheme it is asked, and what it names."""

    layout: Layout
    scheme: str
    bare: bool  # names XRootD's own ports and not those of the fault proxies

    @property
    def url(self) -> str:
        return self.layout.director_url(self.scheme, self.bare)

    def server_url(self, server: str) -> str:
        if self.bare:
            return self.layout.bare_url(server)
        return self.layout.proxy_url(server, self.scheme)


class DirectorHandler(FaultyHandler):
    """Discovery, redirects to caches and to the origin, the issuer's keys."""

    server_name = "director"
    place: ClassVar[Place]
    tokens: ClassVar[TokenCheck]

    def object_path(self, path: str) -> str:
        for kind in ("object", "origin"):
            path = path.removeprefix(f"{API}{kind}") if path.startswith(f"{API}{kind}/") else path
        return path

    def answer(self, path: str, strikes: dict[str, Strike]) -> Answer:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if path.startswith("/.well-known/"):
            return self._well_known(path)
        namespace = find_namespace(path)
        if namespace is None:
            return _refuse(404, "no namespace is known for this path")
        if self.command == "PUT":
            return _refuse(405, "no origin takes writes")
        skip_stat = self.command == "PROPFIND" or self._can_skip_stat(namespace)
        if not skip_stat and not has_object(self.place.layout, path):
            return _refuse(404, "no origin has this object")
        return self._redirect(path, namespace, strikes)

    def _well_known(self, path: str) -> Answer:
        documents = {
            "/.well-known/pelican-configuration": json.dumps(describe_federation(self.place)),
            "/.well-known/openid-configuration": json.dumps(describe_issuer(self.place)),
            "/.well-known/issuer.jwks": self.tokens.jwks(),
        }
        if path not in documents:
            return _refuse(404, "no such document")
        headers = {"Content-Type": "application/json", "Server": SERVER}
        return bytes_answer(200, documents[path].encode(), headers)

    def _can_skip_stat(self, namespace: str) -> bool:
        is_closed = namespace == PROTECTED and self.token() is None
        return is_closed or "skipstat" in self._query()

    def _redirect(self, path: str, namespace: str, strikes: dict[str, Strike]) -> Answer:
        to_origin = urlsplit(self.path).path.startswith(f"{API}origin/")
        to_origin = to_origin or "directread" in self._query() or self.command == "PROPFIND"
        servers: Sequence[str] = ("origin",) if to_origin else CACHES
        if "links" in strikes and not to_origin:
            servers = strikes["links"].fault.caches
        urls = [self.place.server_url(server) + quote(path) for server in servers]
        headers = redirect_headers(urls, path, namespace, self.place)
        query = {"authz": self.token()} if self.token() else {}
        if "directread" in self._query():
            query["directread"] = ""
        headers["Location"] = urls[0] + (f"?{urlencode(query)}" if query else "")
        return Answer(307, headers)

    def _query(self) -> dict[str, list[str]]:
        return parse_qs(urlsplit(self.path).query, keep_blank_values=True)


def describe_federation(place: Place) -> dict[str, str]:
    """The document at /.well-known/pelican-configuration."""
    return {
        "discovery_endpoint": place.url,
        "director_endpoint": place.url,
        "namespace_registration_endpoint": place.url,
        "jwks_uri": f"{place.url}/.well-known/issuer.jwks",
        "broker_endpoint": "",
    }


def describe_issuer(place: Place) -> dict[str, str]:
    """The document at /.well-known/openid-configuration: who signs the tokens."""
    return {"issuer": issuer(place), "jwks_uri": f"{issuer(place)}/.well-known/issuer.jwks"}


def issuer(place: Place) -> str:
    """Tokens carry one issuer, whatever the scheme of the director that was asked."""
    return place.layout.director_url("https")


def redirect_headers(
    urls: Sequence[str], path: str, namespace: str, place: Place
) -> dict[str, str]:
    """What a director adds to a redirect: every source, and how the namespace is read."""
    depth = path.removeprefix(namespace).strip("/").count("/") + 1
    links = [
        f'<{url}>; rel="duplicate"; pri={k}; depth={depth}'
        for k, url in enumerate(urls[:MAX_LINKS], start=1)
    ]
    needs_token = namespace == PROTECTED
    collections_url = place.server_url("origin")
    headers = {
        "Server": SERVER,
        "Link": ", ".join(links),
        "X-Pelican-Namespace": f"namespace={namespace}, require-token={str(needs_token).lower()}, "
        f"collections-url={collections_url}",
    }
    if needs_token:
        headers["X-Pelican-Authorization"] = f"issuer={issuer(place)}"
        headers["X-Pelican-Token-Generation"] = (
            f"issuer={issuer(place)}, max-scope-depth=3, strategy=OAuth2, base-path={namespace}"
        )
    return headers


def find_namespace(path: str) -> str | None:
    """The namespace that a path lies in."""
    return next((n for n in NAMESPACES if path == n or path.startswith(n + "/")), None)


def has_object(layout: Layout, path: str) -> bool:
    """Whether the origin has the object (a real director asks it, too)."""
    connection = http.client.HTTPConnection(HOST, layout.http_port("origin"), timeout=10)
    try:
        connection.request("HEAD", quote(path))
        return connection.getresponse().status == 200
    finally:
        connection.close()


def _refuse(status: int, reason: str) -> Answer:
    content = json.dumps({"status": "error", "msg": reason}).encode()
    return bytes_answer(status, content, {"Content-Type": "application/json", "Server": SERVER})
