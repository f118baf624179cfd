"""Whom this machine can reach at all, and which addresses a server may send it to."""

from __future__ import annotations

import ipaddress
import logging
import socket
import time
from typing import Any
from urllib.parse import urlsplit

from dataset.errors import PassingError
from dataset.federation.framing import ProtocolError
from dataset.federation.tokens import is_loopback
from dataset.redaction import redact

log = logging.getLogger("trainyard.fetch")

CONNECT_S = 10.0
NAME_WAITS_S = (1.0, 2.0)  # a name server may be busy when a thousand jobs start
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_COMPATIBLE = ipaddress.IPv6Network("::/96")
_THIS_NETWORK = ipaddress.IPv4Network("0.0.0.0/8")  # 0.0.0.0 connects to this machine
Found = tuple[Any, ...]  # what getaddrinfo gives


def check_network(url: str) -> None:
    """Raises unless this machine can reach the host at all."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    fix = "this node may have no outbound network; ask its site or run elsewhere"
    if not is_loopback(host) and not _has_route():
        raise PassingError(f"no network: this machine has no route to the outside; {fix}")
    for wait_s in (*NAME_WAITS_S, None):
        try:
            socket.create_connection((host, port), timeout=CONNECT_S).close()
            return
        except socket.gaierror:
            if wait_s is None:
                raise PassingError(f"no network: {host} cannot be resolved; {fix}") from None
            time.sleep(wait_s)
        except OSError as error:
            # The host may just be restarting; the transfer itself waits for it.
            log.warning("%s:%d cannot be reached yet (%s)", host, port, error.strerror or error)
            return


def _has_route() -> bool:
    """Whether the kernel has a route; connecting a datagram socket sends no packet."""
    for family, address in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect((address, 9))
                return True
        except OSError:
            continue
    return False


def is_own_address(text: str) -> bool:
    """Whether an IP address is loopback or link-local, in any form of IPv6."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.is_loopback or address.is_link_local or address.is_unspecified:
            return True
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and (address in _NAT64 or address in _COMPATIBLE):
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is None:
            return False
        address = inner
    return address.is_loopback or address.is_link_local or address in _THIS_NETWORK


class Reach:
    """Where servers may send us: a public one never to a service on this machine.

    Names are judged by the addresses that they resolve to at each connection. The host that the
    user named may be anything; if it was public and becomes local later, it is refused.
    """

    def __init__(self, named_url: str) -> None:
        self._named = (urlsplit(named_url).hostname or "").rstrip(".")
        self._is_own: bool | None = None  # whether the named host is this machine; not known yet

    def choose(self, host: str, found: list[Found]) -> list[Found]:
        """The addresses of a host that may be connected to; raises when there are none."""
        public = [one for one in found if not is_own_address(one[4][0])]
        if host.rstrip(".") == self._named:
            self._is_own = not public and self._is_own is not False
        elif self._is_own is None:
            self._is_own = _names_this_machine(self._named)
        if self._is_own or public:
            return found if self._is_own else public
        raise ProtocolError(
            f"{redact(host)} is a loopback or link-local address; a server on the network may "
            "not send us there"
        )

    def connect(
        self, address: tuple[str, int], timeout: float, source_address: object = None
    ) -> socket.socket:
        """As socket.create_connection, within one time limit for all addresses of the host."""
        host, port = address
        end = time.monotonic() + timeout
        found = self.choose(host, list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))
        error: OSError | None = None
        for number, (family, kind, protocol, _, place) in enumerate(found):
            sock = socket.socket(family, kind, protocol)
            try:
                left_s = max(0.01, end - time.monotonic())
                sock.settimeout(left_s / (len(found) - number))
                sock.connect(place)
                sock.settimeout(timeout)
                return sock
            except OSError as failure:
                sock.close()
                error = failure
        raise error or OSError(f"{host} has no address")


def _names_this_machine(host: str) -> bool:
    """Whether a host is this machine by its name or address alone, without a name server."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return is_own_address(host)
    except ValueError:
        return False
