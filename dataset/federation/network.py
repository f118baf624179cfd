"""Checks whether this machine can reach a host at all, before anything long begins."""

from __future__ import annotations

import logging
import socket
import time
from urllib.parse import urlsplit

from dataset.errors import PassingError
from dataset.federation.connection import CONNECT_S, explain
from dataset.federation.tokens import is_loopback

log = logging.getLogger("trainyard.fetch")

NAME_WAITS_S = (1.0, 2.0)  # a name server may be busy when a thousand jobs start


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
            log.warning("%s:%d cannot be reached yet (%s)", host, port, explain(error))
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
