"""Two make-believe nodes: network namespaces joined by a cable, each with its own name and hosts.

Everything in them is the kernel's own: a rank in one of them sees what a rank on a node would see.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
NAMES = ("n1", "n2")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
CABLES = ("cable1", "cable2")  # the name of the network device differs, as it does on real nodes


@dataclass(frozen=True)
class Nodes:
    """The namespaces of the two nodes, and a folder for their files of hosts."""

    spaces: tuple[str, str]
    folder: Path

    def enter(self, node: int, hosts: str) -> None:
        """Moves this process, which has one thread, to a node with these lines in /etc/hosts."""
        path = self.folder / f"hosts-{node}-{os.getpid()}"
        path.write_text(f"127.0.0.1 localhost\n{hosts}\n")
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.spaces[node]}") as space:
            _check(libc.setns(space.fileno(), CLONE_NEWNET))
        _check(libc.unshare(CLONE_NEWNS | CLONE_NEWUTS))
        _run("mount", "--make-rprivate", "/")
        _run("mount", "--bind", str(path), "/etc/hosts")
        socket.sethostname(NAMES[node])


@contextmanager
def two_nodes(folder: Path) -> Iterator[Nodes]:
    """The nodes, with a bridge in each that leads nowhere, as Docker makes them."""
    spaces = (f"trainyard-{os.getpid()}-1", f"trainyard-{os.getpid()}-2")
    try:
        for space in spaces:
            _run("ip", "netns", "add", space)
            _run("ip", "-n", space, "link", "set", "lo", "up")
            _run("ip", "-n", space, "link", "add", "br-nowhere", "type", "veth")
            _run("ip", "-n", space, "addr", "add", "172.18.0.1/16", "dev", "br-nowhere")
            _run("ip", "-n", space, "link", "set", "br-nowhere", "up")
        first, second = (
            ("name", cable, "netns", space) for space, cable in zip(spaces, CABLES, strict=True)
        )
        _run("ip", "link", "add", *first, "type", "veth", "peer", *second)
        for space, cable, address in zip(spaces, CABLES, ADDRESSES, strict=True):
            _run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", cable)
            _run("ip", "-n", space, "link", "set", cable, "up")
        yield Nodes(spaces, folder)
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
