"""Which network device the ranks of several nodes use: the one that leads to the rendezvous.

Gloo on its own takes the address that the node's own name resolves to, which is often 127.0.1.1
(Debian's /etc/hosts) or nothing: then no other node can reach it. NCCL on its own takes the first
device that is not called lo or docker, which may be a bridge that leads nowhere.
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from train.ranks.compat import has_keys
from train.ranks.rendezvous import open_connection

HOST_KEY = "address of the rendezvous"  # as ranks on other nodes reach it
# Where the address lies in a struct sockaddr of a family, and its length.
FIELDS: dict[int, tuple[int, int]] = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}
NCCL_FILES = ("~/.nccl.conf", "/etc/nccl.conf")


def share_own_address(store: Any) -> str | None:
    """This rank's local address of its connection to the rendezvous; None on rank 0's node.

    A remote rank tells that node the address it uses. Every rank must call this before any rank
    calls choose_interfaces.
    """
    try:
        with open_connection(store) as connection:
            own = _parse(connection.getsockname()[0])
            host = _parse(connection.getpeername()[0])
    except (OSError, ValueError):
        return None
    if own.is_loopback or own == host:
        return None
    store.set(HOST_KEY, str(host))
    return str(own)


def choose_interfaces(store: Any, own: str | None, env: MutableMapping[str, str]) -> None:
    """Tells gloo and NCCL the device to use, unless the user or the site did."""
    addresses = list_addresses()
    if own is None:
        own = store.get(HOST_KEY).decode() if has_keys(store, [HOST_KEY]) else "127.0.0.1"
    device = addresses.get(own)
    if device is None:  # behind address translation: gloo and NCCL choose themselves
        return
    env.setdefault("GLOO_SOCKET_IFNAME", device)
    # With InfiniBand NCCL prefers what is called ib...; its data does not go over these sockets.
    has_infiniband = any(name.startswith("ib") for name in addresses.values())
    files = (env.get("NCCL_CONF_FILE"), *NCCL_FILES)
    is_configured = any(name and Path(name).expanduser().exists() for name in files)
    if not has_infiniband and not is_configured:
        env.setdefault("NCCL_SOCKET_IFNAME", f"={device}")


class _Ifaddrs(ctypes.Structure):
    """struct ifaddrs of getifaddrs(3), as far as it is read here."""


_Ifaddrs._fields_ = [
    ("next", ctypes.POINTER(_Ifaddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def list_addresses() -> dict[str, str]:
    """The name of the network device that each address of this machine belongs to.

    By getifaddrs(3): the standard library lists devices, but not their addresses.
    """
    try:
        libc = ctypes.CDLL(None)
        first = ctypes.POINTER(_Ifaddrs)()
        if libc.getifaddrs(ctypes.byref(first)) != 0:
            return {}
    except (OSError, AttributeError):
        return {}
    found, entry = {}, first
    while entry:
        address = _read_address(entry.contents.address)
        if address:
            found[address] = entry.contents.name.decode()
        entry = entry.contents.next
    libc.freeifaddrs(first)
    return found


def _read_address(place: int | None) -> str:
    """The address of a struct sockaddr, or an empty string where it is of another family."""
    if not place:
        return ""
    family = ctypes.c_ushort.from_address(place).value
    start, size = FIELDS.get(family, (0, 0))
    return str(ipaddress.ip_address(ctypes.string_at(place + start, size))) if size else ""


def _parse(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(address.partition("%")[0])
