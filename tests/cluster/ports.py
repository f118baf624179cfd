"""Fixed ports on loopback: kept from outgoing connections, and waited for until they are free."""

from __future__ import annotations

import socket
import tempfile
import time
from pathlib import Path

from tests.cluster.lifetime import locked

FIRST, LAST = 19000, 19999  # of the mini-OSDF and the HTCondor pool, 100 for each instance
_KERNEL = Path("/proc/sys/net/ipv4")


def reserve_ports(first: int = FIRST, last: int = LAST) -> None:
    """Keeps the kernel from giving these ports to outgoing connections.

    Some machines let them have any port from 1024 on, and a port stays taken for a minute after its
    connection ended. The setting holds until the next boot; where it cannot be made, we go without.
    """
    lowest, highest = map(int, (_KERNEL / "ip_local_port_range").read_text().split())
    if last < lowest or first > highest:
        return
    setting = _KERNEL / "ip_local_reserved_ports"
    with locked(Path(tempfile.gettempdir()) / "trainyard-ports.lock"):
        reserved = setting.read_text().strip()
        wanted = f"{first}-{last}"
        if wanted not in reserved.split(","):
            try:
                setting.write_text(f"{reserved},{wanted}" if reserved else wanted)
            except OSError:  # a container may see it read-only
                return


def wait_until_free(port: int, patience_s: float = 65.0) -> None:
    """Returns when the port can be bound, which an old connection delays by up to a minute."""
    deadline_s = time.monotonic() + patience_s
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))  # as XRootD does it, on every address; never listened on
                return
            except OSError as error:
                if time.monotonic() > deadline_s:
                    raise RuntimeError(
                        f"port {port} is taken ({error.strerror}); end its owner (`ss -tnap`), or "
                        "choose other ports with TRAINYARD_INSTANCE=1 in the environment"
                    ) from error
        time.sleep(0.1)
