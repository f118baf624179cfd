"""Secrets: where a token or a password is found, and who may see it."""

from __future__ import annotations

import base64
import ipaddress
import netrc
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import unquote, urlsplit

from dataset.errors import UserError
from dataset.redaction import SIGNATURES, hold_secret
from dataset.untrusted import parse_json

Logins = netrc.netrc
_LAST_DATE_S = 253402300799.0  # the end of the year 9999: later ones cannot be printed
# What else changes when an address is signed again: S3, Google, CloudFront, Azure.
_SIGNED_WITH = re.compile(r"x-(?:amz|goog)-.*|expires|s[eptvr]|spr|sk[a-z]+")


def drop_signature(url: str) -> str:
    """The address without its signature: signed again, it still names the same object."""
    parts = urlsplit(url)
    pairs = [(pair.partition("=")[0].lower(), pair) for pair in parts.query.split("&")]
    is_signed = any(name.endswith("signature") or name == "sig" for name, _ in pairs)
    kept = [
        pair
        for name, pair in pairs
        if name not in SIGNATURES and not (is_signed and _SIGNED_WITH.fullmatch(name))
    ]
    if len(kept) == len(pairs):
        return url
    return parts._replace(query="&".join(kept)).geturl()


def hold_url_secrets(url: str) -> None:
    """Registers a password or signature in a user's address, so that it is shown nowhere."""
    parts = urlsplit(url)
    pairs = [pair.partition("=") for pair in parts.query.split("&")]
    values = [value for name, _, value in pairs if name.lower() in SIGNATURES]
    # https://TOKEN@host and https://TOKEN:x-oauth-basic@host: the name is the secret.
    user = parts.username or ""
    is_token = parts.password in (None, "", "x-oauth-basic")
    for value in (parts.password or "", user if is_token else "", *values):
        hold_secret(value)
        hold_secret(unquote(value))


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, by its name or address and without asking a name server."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def may_carry_secret(url: str) -> bool:
    """Whether a secret may be sent to this address at all: https, or plain http on loopback."""
    parts = urlsplit(url)
    return parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname or ""))


class TokenStore:
    """The bearer token of this process, read again when a server refuses it."""

    def __init__(self, environ: Mapping[str, str], file: Path | None = None, uid: int = 0) -> None:
        self._environ = environ
        self._file = file
        self._uid = uid
        if file is not None and not file.is_file():
            raise UserError(f"--token {file}: no such file; give the file that holds the token")
        self._token = self._find()

    @property
    def token(self) -> str | None:
        return self._token

    @property
    def expiry(self) -> float | None:
        """When the token expires, in seconds since 1970; None if that is not known."""
        return read_expiry(self._token) if self._token is not None else None

    @property
    def was_given(self) -> bool:
        """Whether the user named the token's file, and it was not just found somewhere."""
        return self._file is not None

    def reread(self) -> bool:
        """Looks for the token again; True when it is another one than before."""
        before = self._token
        self._token = self._find()
        return self._token is not None and self._token != before

    def describe(self) -> str:
        """What is wrong with the token, for an error message; never the token itself."""
        if self._token is None:
            return "no token found; give --token FILE or set BEARER_TOKEN_FILE"
        expiry = read_expiry(self._token)
        if expiry is not None and expiry < time.time():
            when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(expiry))
            return f"the token expired at {when}; get a new one"
        return "the token is not accepted; is it for this namespace (scope storage.read)?"

    def _find(self) -> str | None:
        """The first token of the usual places; an expired one only when there is no other."""
        expired = None
        for token in self._candidates():
            hold_secret(token)
            expiry = read_expiry(token)
            if expiry is None or expiry > time.time():
                return token
            expired = expired or token
        return expired

    def _candidates(self) -> Iterator[str]:
        if self._file is not None:
            yield from _read_token(self._file)
            return
        if self._environ.get("BEARER_TOKEN", "").strip():
            yield self._environ["BEARER_TOKEN"].strip()
        if self._environ.get("BEARER_TOKEN_FILE"):
            yield from _read_token(Path(self._environ["BEARER_TOKEN_FILE"]))
        runtime = self._environ.get("XDG_RUNTIME_DIR") or "/tmp"
        yield from _read_token(Path(runtime) / f"bt_u{self._uid}")
        if self._environ.get("_CONDOR_CREDS"):
            for path in sorted(Path(self._environ["_CONDOR_CREDS"]).glob("*.use")):
                yield from _read_token(path)


def _read_token(path: Path) -> Iterator[str]:
    """The token in a file, bare or as the JSON of an OAuth2 answer; none when it is unreadable."""
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return
    if text.startswith("{"):
        try:
            text = str(parse_json(text).get("access_token", ""))
        except ValueError:
            text = ""
    if text and not any(c.isspace() for c in text):
        yield text


def read_expiry(token: str) -> float | None:
    """The `exp` of a JWT in seconds since 1970, unverified; None for other tokens."""
    parts = token.split(".")
    if len(parts) != 3:
        return None
    try:
        payload = base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4))
        expiry = float(parse_json(payload)["exp"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
    return expiry if 0 <= expiry <= _LAST_DATE_S else None


def read_logins(environ: Mapping[str, str], file: Path | None = None) -> Logins | None:
    """The logins of a netrc file, the given one or the usual one; None without a usual one."""
    path = file or Path(environ.get("NETRC") or Path(environ.get("HOME", "/")) / ".netrc")
    if file is not None and not file.is_file():
        raise UserError(f"--netrc {file}: no such file; give the file that holds the logins")
    if not path.is_file():
        return None
    try:
        logins = Logins(str(path))
        for _, _, password in logins.hosts.values():
            hold_secret(password or "")
        return logins
    except netrc.NetrcParseError as error:  # its text may hold a password
        where = f"{path}, line {error.lineno}"
    except (OSError, UnicodeDecodeError) as error:
        where = f"{path} ({getattr(error, 'strerror', 'not a text')})"
    raise UserError(f"cannot read logins from {where}; see man netrc")


def find_login(url: str, logins: Logins | None) -> str | None:
    """The value of a Basic Authorization header for a host, from the URL or the logins."""
    parts = urlsplit(url)
    if not may_carry_secret(url):
        return None
    if parts.username:
        return _basic(unquote(parts.username), unquote(parts.password or ""))
    entry = logins.authenticators(parts.hostname or "") if logins is not None else None
    return _basic(entry[0], entry[2] or "") if entry else None


def _basic(user: str, password: str) -> str:
    value = base64.b64encode(f"{user}:{password}".encode()).decode()
    hold_secret(password)
    hold_secret(value)
    return f"Basic {value}"


@dataclass(frozen=True)
class Access:
    """Secrets and where they come from: the edge of the program, passed inward."""

    environ: Mapping[str, str]
    tokens: TokenStore
    netrc: Path | None = None

    def __post_init__(self) -> None:
        if self.netrc is not None:
            _ = self._logins  # what is wrong with it is said at the start

    @cached_property
    def _logins(self) -> Logins | None:
        return read_logins(self.environ, self.netrc)

    def headers(self, url: str, wants_token: bool) -> dict[str, str]:
        """The Authorization for a server of the federation, where it may be sent."""
        if wants_token and self.tokens.token and may_carry_secret(url):
            return {"Authorization": f"Bearer {self.tokens.token}"}
        return {}

    def login(self, url: str) -> dict[str, str]:
        """The Authorization for a plain server outside a federation."""
        basic = find_login(url, self._logins if may_carry_secret(url) else None)
        if basic:
            return {"Authorization": basic}
        # A token that merely lies about in the environment is for federations, not for any server.
        return self.headers(url, wants_token=self.tokens.was_given)
