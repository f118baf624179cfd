"""Which network the ranks of several nodes use to talk to each other."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests.train import started_ranks as ranks
from tests.train.nodes import ADDRESSES, NAMES, Nodes, two_nodes
from train.ranks import interfaces

NUM_RANKS = 3  # two on the node of rank 0, one on the other
OTHER = (f"{ADDRESSES[1]} {NAMES[1]}", f"{ADDRESSES[0]} {NAMES[0]}")
# What the hosts file of a node says of its own name.
OWN_NAME = {"debian": "127.0.1.1 {}", "unknown": ""}


def node_of(rank: int) -> int:
    return int(rank == NUM_RANKS - 1)


def step_variables(rank: int) -> dict[str, str]:
    """What srun sets."""
    node = node_of(rank)
    local = rank if node == 0 else 0
    numbers = {"JOB_ID": 7, "STEP_ID": 0, "PROCID": rank, "LOCALID": local, "NODEID": node}
    sizes = {"STEP_NUM_TASKS": NUM_RANKS, "STEP_NUM_NODES": 2}
    texts = {"STEP_NODELIST": "n[1-2]", "STEP_TASKS_PER_NODE": "2,1"}
    return {f"SLURM_{name}": str(value) for name, value in (numbers | sizes | texts).items()}


def by_hand(rank: int) -> dict[str, str]:
    """What a script sets that starts the ranks itself, as torchrun does on several nodes."""
    node = node_of(rank)
    names = {"RANK": rank, "LOCAL_RANK": rank if node == 0 else 0, "WORLD_SIZE": NUM_RANKS}
    more = {"LOCAL_WORLD_SIZE": 2 - node, "GROUP_RANK": node, "MASTER_PORT": 29500}
    return {name: str(value) for name, value in (names | more).items()} | {"MASTER_ADDR": NAMES[0]}


def enter(nodes: Nodes, own_name: str) -> None:
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "")))
    node = node_of(rank)
    own = OWN_NAME[own_name].format(NAMES[node], ADDRESSES[node])
    nodes.enter(node, f"{own}\n{OTHER[node]}")


@pytest.mark.netns
@pytest.mark.parametrize(("env", "own_name"), [(step_variables, "debian"), (by_hand, "unknown")])
def test_ranks_of_two_nodes_meet_whatever_their_own_name_resolves_to(
    tmp_path: Path, env: Callable[[int], dict[str, str]], own_name: str
) -> None:
    with two_nodes(tmp_path) as nodes:
        argv = ["--dummy", "-b", "9", "--max-steps", "2", "--output", str(tmp_path / "out")]
        hook = partial(enter, nodes, own_name)
        ranks.run(argv, tmp_path / "log", NUM_RANKS, env=env, hook=hook).expect(0)


def choose(env: dict[str, str]) -> dict[str, str]:
    """The variables after the choice, on the node of the rendezvous, reached at 127.0.0.1."""
    store = HashStore()
    store.set(interfaces.HOST_KEY, "127.0.0.1")
    interfaces.choose_interfaces(store, None, env)
    return env


def test_gloo_and_nccl_get_the_device_unless_the_user_or_the_site_named_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interfaces, "NCCL_FILES", ())
    assert choose({}) == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    named = {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "^docker"}
    assert choose(dict(named)) == named
    (tmp_path / "nccl.conf").write_text("NCCL_SOCKET_IFNAME=eth8\n")
    site = {"NCCL_CONF_FILE": str(tmp_path / "nccl.conf")}
    assert choose(dict(site)) == site | {"GLOO_SOCKET_IFNAME": "lo"}


def test_nccl_keeps_its_own_choice_where_there_is_infiniband(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    addresses = {"127.0.0.1": "lo", "10.0.0.7": "ib0"}
    monkeypatch.setattr(interfaces, "NCCL_FILES", ())
    monkeypatch.setattr(interfaces, "list_addresses", lambda: addresses)
    assert choose({}) == {"GLOO_SOCKET_IFNAME": "lo"}


def test_an_address_that_is_not_of_this_machine_leaves_the_choice_to_gloo() -> None:
    env: dict[str, str] = {}
    interfaces.choose_interfaces(HashStore(), "203.0.113.7", env)
    assert env == {}


def test_addresses_of_both_families_are_listed_with_their_device() -> None:
    expected = {}
    for line in subprocess.check_output(["ip", "-o", "addr"], text=True).splitlines():
        _, device, _, address, *_ = line.split()
        expected[address.partition("/")[0]] = device.partition("@")[0]
    assert interfaces.list_addresses() == expected
