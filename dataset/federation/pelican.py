"""What a Pelican federation says, parsed: URLs, discovery, the director's answers; no network."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qs, urljoin, urlsplit

from dataset.errors import UserError
from dataset.federation.tokens import drop_signature, may_carry_secret
from dataset.redaction import redact, redact_name
from dataset.spelling import decode, encode
from dataset.untrusted import parse_count, parse_json

OSDF_DISCOVERY = "https://osg-htc.org"
DISCOVERY_PATH = "/.well-known/pelican-configuration"
MAX_SOURCES = 64  # of one answer; the far ones are used when the nearest few fail
_PATH_SAFE = "/%:@!$&'()*+,;=~-._"
_HTTP = ("http", "https")


@dataclass(frozen=True)
class Target:
    """One object or collection as the user named it; `discovery` is None outside a federation."""

    scheme: str  # "pelican", "https", "http" or "file"
    path: str  # percent-encoded, starts with "/"
    discovery: str | None = None  # scheme://host of the federation
    url: str = ""  # the address itself for https, http and file; may hold secrets in its query
    directread: bool = False
    recursive: bool = False

    @property
    def identity(self) -> str:
        """The text that names this object in journals, logs and summaries: never a secret."""
        if self.scheme == "pelican":
            return redact_name(f"pelican://{urlsplit(self.discovery or '').netloc}{self.path}")
        return redact_name(drop_signature(self.url))

    @property
    def name(self) -> str:
        """The file name of the object: the last part of its path, decoded."""
        name = decode(self.path.rstrip("/").rpartition("/")[2])
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise UserError(f"{self.identity} names no file; give the path of an object")
        return name

    def child(self, path: str) -> Target:
        """The target of another path (percent-encoded) at the same place."""
        parts = urlsplit(self.url)  # not urljoin, which would take the a of //a/b for a host
        url = parts._replace(path=path, query="", fragment="").geturl() if self.url else ""
        return Target(self.scheme, path, self.discovery, url, self.directread)


def parse_target(text: str, federation: str | None = None) -> Target:
    """The target of osdf:///path, pelican://host/path, https, http or file; else a UserError."""
    if text.startswith("/"):  # a plain path has nothing encoded in it
        return Target("file", encode(text), url="file://" + encode(text))
    parts = _split(text)
    if parts.scheme in ("osdf", "stash"):
        # osdf://ns/object is an old way of writing osdf:///ns/object, read so by Pelican too
        path = (f"/{parts.netloc}" if parts.netloc else "") + parts.path
        return _federated(text, path, parts.query, parse_federation(federation or OSDF_DISCOVERY))
    if parts.scheme == "pelican":
        if not is_address(f"https://{parts.netloc}"):
            raise UserError(f"{redact(text)} names no federation; write pelican://HOST/path")
        return _federated(text, parts.path, parts.query, f"https://{parts.netloc}")
    if parts.scheme in _HTTP:
        if not is_address(text):
            shown = redact(re.sub("//.*@", "//[removed]@", text))  # a password may hold a slash
            raise UserError(f"{shown} names no host; write {parts.scheme}://HOST/path")
        path = encode(parts.path or "/", safe=_PATH_SAFE)
        return Target(parts.scheme, path, url=parts._replace(path=path, fragment="").geturl())
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise UserError(f"{text} names another machine; write file:///path")
        path = encode(decode(parts.path))
        return Target("file", path, url=f"file://{path}")
    raise UserError(
        f"cannot fetch from {redact(text)!r}: use osdf:///path, pelican://HOST/path, https://, "
        "http:// or file:///path"
    )


def _split(text: str) -> SplitResult:
    """The parts of a URL, with '#' (and, in the name of a file, '?') as ordinary characters.

    http and https are left to urlsplit. For the others it would cut a name off at '#' as a
    fragment, and what is left may name another object.
    """
    scheme = text.partition(":")[0].lower()
    if scheme not in _HTTP:
        text = text.replace("#", "%23")
    if scheme == "file":
        text = text.replace("?", "%3F")
    try:
        return urlsplit(text)
    except ValueError as error:  # as of http://[
        raise UserError(f"cannot read the URL {redact(text)!r}: {error}") from None


def _federated(text: str, path: str, query: str, discovery: str) -> Target:
    options = parse_qs(query, keep_blank_values=True)
    unknown = sorted(set(options) - {"directread", "recursive"})
    if "authz" in unknown:
        raise UserError("a token in the URL can be read by others; put it in a file: --token FILE")
    if unknown:
        raise UserError(
            f"unknown option {unknown[0]!r} in {redact(text)}; known: directread, recursive; "
            "a '?' in a name is written %3F"
        )
    path = encode("/" + path.lstrip("/"), safe=_PATH_SAFE)
    if path == "/":
        raise UserError(f"{redact(text)} names no object; write osdf:///namespace/object")
    return Target("pelican", path, discovery, "", "directread" in options, "recursive" in options)


def parse_federation(text: str) -> str:
    """scheme://host of a federation given as HOST or URL; plain http only when it is written so."""
    url = text if "://" in text else f"https://{text}"
    if not is_address(url):
        raise UserError(f"--federation {redact(text)!r} is not an address; give https://HOST")
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def parse_discovery(body: bytes, where: str) -> str:
    """The director's address out of a discovery document; ValueError when there is none."""
    try:
        endpoint = parse_json(body)["director_endpoint"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{where} names no director (is it a Pelican federation?)") from None
    if not isinstance(endpoint, str) or not endpoint:
        raise ValueError(f"{where} names no director (is it a Pelican federation?)")
    if "://" not in endpoint:
        endpoint = f"https://{endpoint}"
    if not is_address(endpoint):
        raise ValueError(f"{where} names a director that is not an address: {endpoint!r}")
    return endpoint.rstrip("/")


@dataclass(frozen=True)
class Namespace:
    """X-Pelican-Namespace: the part of the federation that holds a path."""

    prefix: str = ""
    require_token: bool = False
    collections_url: str | None = None


def parse_namespace(value: str) -> Namespace:
    """The namespace of an X-Pelican-Namespace header; unknown keys are left alone."""
    pairs = {}
    for item in value.split(","):
        key, equals, text = item.strip().partition("=")
        if equals:
            pairs[key.strip().lower()] = text.strip()
    return Namespace(
        prefix=pairs.get("namespace", ""),
        require_token=pairs.get("require-token", "").lower() == "true",
        collections_url=pairs.get("collections-url") or None,
    )


@dataclass(frozen=True)
class Link:
    """One address of a Link header; a smaller priority is nearer."""

    url: str
    priority: int
    depth: int


_LINK = re.compile(r'<([^<>]*)>((?:\s*;\s*[\w*-]+\s*=\s*(?:"[^"]*"|[^\s;,"]+))*)')
_PARAMETER = re.compile(r';\s*([\w*-]+)\s*=\s*(?:"([^"]*)"|([^\s;,"]+))')


def parse_links(value: str) -> list[Link]:
    """The rel=duplicate addresses of a Link header, nearest first, each host once, at most 64."""
    links = []
    for order, match in enumerate(_LINK.finditer(value), 1):
        found = {m[1].lower(): m[2] or m[3] for m in _PARAMETER.finditer(match[2])}
        if found.get("rel") != "duplicate" or not is_address(match[1]):
            continue
        links.append(
            Link(match[1], _number(found.get("pri"), order), _number(found.get("depth"), 0))
        )
    links.sort(key=lambda link: link.priority)
    by_place: dict[tuple[str, ...], Link] = {}
    for link in links:
        by_place.setdefault(urlsplit(link.url)[:3], link)
    return list(by_place.values())[:MAX_SOURCES]


def is_address(url: str) -> bool:
    """Whether a URL is http or https, with a host and a port that can exist."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")  # fails for a host such as a..b
        return parts.scheme in _HTTP and bool(host) and parts.port != 0
    except ValueError:
        return False


def join_address(base: str, location: str) -> str | None:
    """The address that a Location leads to; None if it is not a valid http or https one."""
    try:
        url = urljoin(base, location)
    except ValueError:
        return None
    return url if is_address(url) else None


def drop_authz(url: str) -> str:
    """The address without the token that a director put into it; we send ours in a header."""
    parts = urlsplit(url)
    kept = [pair for pair in parts.query.split("&") if pair and not pair.startswith("authz=")]
    return parts._replace(query="&".join(kept)).geturl()


def _number(text: str | None, default: int) -> int:
    try:
        return parse_count(text or "")
    except ValueError:
        return default


class Verdict(enum.Enum):
    """What a look-up at the director means for the transfer."""

    FOUND = "found"
    MISSING = "missing"  # the director itself says 404
    DENIED = "denied"  # 401 or 403: a token is needed, or another one
    PASSING = "passing"  # anything temporary, even a 404 of a web server before the director


@dataclass(frozen=True)
class DirectorAnswer:
    """A judged answer of the director; sources in the director's order, nearest first."""

    verdict: Verdict
    sources: tuple[str, ...] = ()
    namespace: Namespace = Namespace()
    reason: str = ""
    status: int = 0
    is_pelican: bool = False


def speaks_pelican(headers: Mapping[str, str]) -> bool:
    """Whether an answer (header names in lower case) is Pelican's, not a web server's before it."""
    is_named = headers.get("server", "").lower().startswith("pelican")
    return is_named or any(name.startswith("x-pelican-") for name in headers)


def speaks_for_federation(headers: Mapping[str, str]) -> bool:
    """Whether an answer is of a server of a federation: Pelican's own, or its XRootD."""
    return speaks_pelican(headers) or headers.get("server", "").lower().startswith("xrootd")


def read_director_answer(status: int, headers: Mapping[str, str], base: str) -> DirectorAnswer:
    """The verdict on one answer (header names in lower case) to a request for `base`."""
    is_pelican = speaks_pelican(headers)
    namespace = parse_namespace(headers.get("x-pelican-namespace", ""))
    if status in (301, 302, 303, 307, 308):
        sources = [link.url for link in parse_links(headers.get("link", ""))]
        location = join_address(base, headers["location"]) if "location" in headers else None
        if not sources and location is not None:
            sources = [location]
        sources = [drop_authz(url) for url in sources]
        if namespace.require_token and not all(map(may_carry_secret, sources)):
            sources = [url for url in sources if may_carry_secret(url)]
            if not sources:
                reason = "the director names only plain http for an object that wants a token"
                return DirectorAnswer(Verdict.PASSING, reason=reason, status=status)
        if sources and (is_pelican or "link" in headers):
            return DirectorAnswer(Verdict.FOUND, tuple(sources), namespace, status=status)
        reason = f"{status} without a Pelican answer"
        return DirectorAnswer(Verdict.PASSING, reason=reason, status=status)
    final = {401: Verdict.DENIED, 403: Verdict.DENIED, 404: Verdict.MISSING}
    verdict = final.get(status, Verdict.PASSING) if is_pelican else Verdict.PASSING
    whose = "the director" if is_pelican else "a server that is not the director"
    return DirectorAnswer(verdict, (), namespace, f"{whose} answered {status}", status, is_pelican)
