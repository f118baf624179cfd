"""How the ranks of a job find each other: one store at rank 0, with a token of the job."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from dataset.errors import PassingError, UserError
from train.ranks.compat import has_keys
from train.ranks.launch import Launch
from train.ranks.launch_variables import read_whole

CLIENT_TIMEOUT_S = 5.0


def connect(launch: Launch, timeout: timedelta) -> Any:
    """The store that all ranks share."""
    if not launch.ports:  # torchrun and its like run the rendezvous themselves
        return _join_store(launch, timeout)
    if launch.is_main:
        return _serve_store(launch, timeout)
    return _find_store(launch, timeout)


def _join_store(launch: Launch, timeout: timedelta) -> Any:
    """The store at MASTER_ADDR; usually torchrun's agent already serves it."""
    master, port = os.environ["MASTER_ADDR"], read_whole(os.environ, "MASTER_PORT")
    host = resolve_host(master)
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = TCPStore(
            host,
            port,
            launch.world_size,
            is_master=launch.is_main and not hosted,
            timeout=timeout,
            wait_for_workers=False,
        )
    except RuntimeError as error:
        doing = "serve" if launch.is_main and not hosted else "reach"
        reason = str(error).splitlines()[0][:150]
        raise PassingError(
            f"rank {launch.rank} cannot {doing} the rendezvous at MASTER_ADDR={master} "
            f"MASTER_PORT={port}: {reason}; is the port taken, or did rank 0 not start?"
        ) from None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"trainyard/{attempt}", store)


def _serve_store(launch: Launch, timeout: timedelta) -> Any:
    """Rank 0's store on the first free candidate port, marked with the job's token."""
    for port in launch.ports:
        try:
            store = TCPStore(
                "0.0.0.0" if launch.num_nodes > 1 else "127.0.0.1",
                port,
                launch.world_size,
                is_master=True,
                timeout=timeout,
                wait_for_workers=False,
            )
        except RuntimeError:  # taken by another job or program
            continue
        store.set(_token_key(launch), "here")
        return store
    raise PassingError(
        f"none of the {len(launch.ports)} rendezvous ports from {launch.ports[0]} is free on "
        "this node; try again, or export MASTER_PORT"
    )


def _find_store(launch: Launch, timeout: timedelta) -> Any:
    """The store of this job's rank 0, found by its token among the candidate ports."""
    host = resolve_host(launch.master_host) if launch.master_host else "127.0.0.1"
    deadline_s = time.monotonic() + timeout.total_seconds()
    attempts: dict[int, _PortTrial] = {}
    while time.monotonic() < deadline_s:
        for port in launch.ports:
            if port not in attempts or attempts[port].has_failed:
                attempts[port] = _PortTrial(host, port, launch)
                attempts[port].join(min(CLIENT_TIMEOUT_S, max(0.0, deadline_s - time.monotonic())))
            store = attempts[port].store
            if store is not None:
                store.set_timeout(timeout)
                return store
        time.sleep(0.1)
    raise PassingError(
        f"rank {launch.rank} did not find rank 0 at {host} within {timeout.total_seconds():.0f} s; "
        "did rank 0 start? its log says why not"
    )


class _PortTrial(threading.Thread):
    """Tries a port in a thread, because a service that accepts but stays silent would block us.

    A thread that hangs is not repeated for its port; a slow store is still found when it answers.
    """

    def __init__(self, host: str, port: int, launch: Launch) -> None:
        super().__init__(daemon=True)
        self.store: Any = None
        self._where = host, port, launch
        self.start()

    @property
    def has_failed(self) -> bool:
        return not self.is_alive() and self.store is None

    def run(self) -> None:
        self.store = _try_store(*self._where)


def _try_store(host: str, port: int, launch: Launch) -> Any:
    """A client of the store at this port if it is this job's, else None."""
    try:
        socket.create_connection((host, port), timeout=CLIENT_TIMEOUT_S).close()
        store = TCPStore(
            host,
            port,
            launch.world_size,
            is_master=False,
            timeout=timedelta(seconds=CLIENT_TIMEOUT_S),
            wait_for_workers=False,
        )
        return store if has_keys(store, [_token_key(launch)]) else None
    except (OSError, RuntimeError):
        return None


def open_connection(store: Any) -> socket.socket:
    """A new connection to the machine that serves a store; an OSError where nobody listens."""
    server = getattr(store, "underlying_store", store)
    return socket.create_connection((server.host, server.port), CLIENT_TIMEOUT_S)


def is_served(store: Any) -> bool:
    """Whether the process that serves a store still lives."""
    try:
        open_connection(store).close()
        return True
    except OSError:
        return False


def _token_key(launch: Launch) -> str:
    return f"trainyard/token/{launch.token}"


def resolve_host(name: str) -> str:
    """An address of a node; if SLURM's name for it is not in the DNS, SLURM is asked."""
    try:
        socket.getaddrinfo(name, None)
        return name
    except socket.gaierror:
        pass
    if name.partition(".")[0] == socket.gethostname().partition(".")[0]:
        return "127.0.0.1"  # a node that does not know its own name
    try:
        shown = subprocess.run(
            ["scontrol", "--oneliner", "show", "node", name],
            capture_output=True, text=True, timeout=30,
        ).stdout  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        shown = ""
    for word in shown.split():
        if word.startswith("NodeAddr="):
            return word.removeprefix("NodeAddr=")
    raise UserError(f"the host of rank 0, {name!r}, cannot be resolved; export MASTER_ADDR")
