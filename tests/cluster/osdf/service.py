"""The mini-OSDF as a service of the tests: start, stop, objects, tokens, faults, traffic."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tests.cluster import lifetime, ports
from tests.cluster.osdf import certificates, health, objects, xrootd
from tests.cluster.osdf.control import FaultHandle, ask
from tests.cluster.osdf.layout import HOST, PROTECTED, PUBLIC, SERVERS, default_layout
from tests.cluster.osdf.rules import Fault

__all__ = ["PROTECTED", "PUBLIC", "Fault", "FaultHandle"]

_ROOT = Path(__file__).resolve().parents[3]
_layout = default_layout()

# A federation is named by its director. Through the fault proxies, over https and http:
DIRECTOR_URL = _layout.director_url("https")
DIRECTOR_HTTP_URL = _layout.director_url("http")
ORIGIN_URL = _layout.proxy_url("origin", "https")
ORIGIN_HTTP_URL = _layout.proxy_url("origin", "http")
CACHE_URLS = tuple(_layout.proxy_url(cache, "https") for cache in ("cache1", "cache2"))
CACHE_HTTP_URLS = tuple(_layout.proxy_url(cache, "http") for cache in ("cache1", "cache2"))
# Straight to XRootD, for benchmarks; these directors name XRootD's own ports:
BARE_DIRECTOR_URL = _layout.director_url("https", bare=True)
BARE_DIRECTOR_HTTP_URL = _layout.director_url("http", bare=True)
BARE_ORIGIN_URL = _layout.bare_url("origin")
BARE_CACHE_URLS = tuple(_layout.bare_url(cache) for cache in ("cache1", "cache2"))

CA_FILE = _layout.certificates / "ca.pem"
PORTS = tuple(_layout.ports)


def missing() -> str | None:
    """Why the mini-OSDF cannot run here, or None."""
    return lifetime.why_not_root_and_apt()


def is_up() -> bool:
    """Whether every part runs and answers."""
    return not _life.is_abandoned() and _answers()


def up() -> None:
    """Installs XRootD when it is not there and starts all parts; quick when they run."""
    with _life.exclusive():
        started = not is_up()
        if started:
            _stop()
            lifetime.apt_install("xrootd-server", "xrootd-client")
            try:
                _start()
            except BaseException:
                _stop()
                raise
        _life.join(started)


def down() -> None:
    """Stops all parts and removes their files; a run that still uses them does so when it ends."""
    with _life.exclusive():
        if _life.leave():
            _stop()


def how_to_use() -> str:
    """What a person can try."""
    return "\n".join(
        [
            f"  federation  {DIRECTOR_URL} (CA: {CA_FILE}) or {DIRECTOR_HTTP_URL}",
            f"  objects     put files below {_layout.data('origin')}{PUBLIC}",
            f"  try         curl -L {DIRECTOR_HTTP_URL}{PUBLIC}/NAME",
            "  faults      see tests/cluster/osdf/README.md",
        ]
    )


def put(name: str, content: bytes | Path, namespace: str = PUBLIC) -> str:
    """Makes an object at the origin, from bytes or a file; returns its path, '/public/NAME'.

    A name that was used before (removed or not) is refused for another content: caches keep it.
    """
    path = f"{namespace}/{name}"
    objects.put_object(_layout, path, content)
    return path


def remove(path: str) -> None:
    """Removes an object, or a folder of them, from the origin and from the disks of the caches."""
    objects.remove_object(_layout, path)


def files_of_people() -> Path | None:
    """Where a person puts objects, which down() deletes."""
    return None if _life.is_of_tests() else _layout.data("origin") / PUBLIC.strip("/")


def make_token(lifetime_s: float = 3600.0, scope: str = f"storage.read:{PROTECTED}") -> str:
    """A token that opens the protected namespace for that many seconds."""
    return certificates.make_token(_layout.certificates, DIRECTOR_URL, scope, lifetime_s)


def revoke(token: str) -> None:
    """Makes a token invalid from now on."""
    ask(_layout, "/tokens/revoke", {"token": token})


def faults(*faults: Fault, seed: int = 0) -> FaultHandle:
    """Sets faults until the handle's remove() or the end of its `with` block."""
    return FaultHandle(_layout, faults, seed)


def wan(path: str = "*", delay_s: float = 0.060, bytes_per_s: float = 25e6) -> FaultHandle:
    """A long fat network in front of every cache and the origin, per connection."""
    fault = Fault("wan", path=path, server="[co]*", delay_s=delay_s, bytes_per_s=bytes_per_s)
    return faults(fault)


def link(bytes_per_s: float, delay_s: float = 0.0, path: str = "*") -> FaultHandle:
    """A link of that rate in front of every cache and the origin, for all connections together."""
    return faults(
        Fault("link", path=path, server="[co]*", delay_s=delay_s, bytes_per_s=bytes_per_s)
    )


def traffic(path: str = "*", server: str = "*") -> list[dict[str, Any]]:
    """The requests for matching objects so far, oldest first (fields: traffic.py's Entry)."""
    result: list[dict[str, Any]] = ask(
        _layout, f"/traffic?{urlencode({'path': path, 'server': server})}"
    )
    return result


def sent_bytes(path: str = "*", server: str = "*") -> int:
    """How many bytes of bodies the proxies sent for matching objects."""
    return sum(entry["bytes"] for entry in traffic(path, server))


def forget_traffic(path: str = "*") -> None:
    """Drops the record of the requests for matching objects."""
    ask(_layout, "/traffic/forget", {"path": path})


def processes() -> list[int]:
    """All that run for the mini-OSDF: servers, proxies, the director."""
    return lifetime.find_marked(_layout.folder)


def stop_server(server: str) -> None:
    """Stops one XRootD for good (origin, cache1, cache2): its proxy then closes connections."""
    health.note_stop(_layout, server, is_meant=True)
    pids = health.read_pids(_layout, server)
    lifetime.end_processes(lambda: [pid for pid in processes() if pid in pids])


def start_server(server: str) -> None:
    """Starts an XRootD again that stop_server() stopped; its data are still there."""
    xrootd.start_server(_layout, server)
    xrootd.wait_until_answering(_layout, server)
    health.note_stop(_layout, server, is_meant=False)


def start_dead_servers() -> list[str]:
    """Starts each XRootD again that ended by itself; what was found about each."""
    if not health.find_ill(_layout):
        return []
    with _life.exclusive():  # another test run may have seen it too
        found = [health.cure(_layout, server) for server in health.find_ill(_layout)]
    return [text for text in found if text]


def _start() -> None:
    ports.reserve_ports()
    for port in PORTS:
        ports.wait_until_free(port)
    certificates.make_certificates(_layout.certificates, HOST)
    for server in SERVERS:  # a cache waits for the origin by itself
        xrootd.start_server(_layout, server)
    _start_front()
    for server in SERVERS:
        xrootd.wait_until_answering(_layout, server)


def _start_front() -> None:
    command = [sys.executable, "-m", "tests.cluster.osdf.front", str(_layout.folder)]
    log = _layout.folder / "front.log"
    with open(log, "wb") as errors:
        process = subprocess.Popen(
            [*command, str(_layout.base_port)],
            cwd=_ROOT,
            env={**os.environ, lifetime.MARK: str(_layout.folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    assert process.stdout is not None
    with process.stdout as output:
        if output.readline() != b"ready\n":
            raise RuntimeError(f"the director did not start:\n{log.read_text()}")


def _stop() -> None:
    lifetime.end_processes(lambda: lifetime.find_marked(_layout.folder))
    shutil.rmtree(_layout.folder, ignore_errors=True)


def _answers() -> bool:
    try:
        return bool(ask(_layout, "/health")["ok"]) and all(
            xrootd.answers(_layout, s) for s in SERVERS
        )
    except OSError:
        return False


_life = lifetime.Lifetime(_layout.folder, _stop)
