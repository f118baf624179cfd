"""Reads the variables of launchers strictly: whole numbers, whole sets, SLURM's short forms."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

from dataset.errors import UserError

# Candidate ports are below Linux's ephemeral range (32768-60999), so that no outgoing connection
# of the machine can occupy one by chance.
FIRST_PORT, LAST_PORT = 16384, 32700
NUM_PORTS = 16
MAX_RANKS = 1_000_000
MAX_HOSTS = 1_000_000
MAX_DIGITS = 40  # of one item of a short form: numbers of 5,000 digits do not count hosts


def read_whole(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """The variable as a whole number, or the default where it is not set."""
    if default is not None and name not in env:
        return default
    text = env[name].strip()
    lowest, highest = _bounds(name)
    is_number = text.isascii() and text.removeprefix("-").isdecimal() and len(text) < 20
    if is_number and lowest <= int(text) <= highest:
        return int(text)
    what = f"in [{lowest}, {highest}]" if is_number else "a whole number"
    raise UserError(f"{name}={env[name][:50]!r} is not {what}; fix or unset it")


def _bounds(name: str) -> tuple[int, int]:
    """The values that a variable can have, by what its name counts."""
    if name == "MASTER_PORT":
        return 1, 65535
    if name.endswith(("SIZE", "NTASKS", "NUM_TASKS", "NUM_NODES")):
        return 1, MAX_RANKS
    return 0, 2**32  # ranks are compared with the size; job ids are 32 bits wide


def read_ports(env: Mapping[str, str], token: str) -> tuple[int, ...]:
    """The ports to try: first the one an sbatch file sets, which another job may hold already."""
    hint = (read_whole(env, "MASTER_PORT"),) if "MASTER_PORT" in env else ()
    return hint + candidate_ports(token)


def candidate_ports(token: str) -> tuple[int, ...]:
    """Ports to try in turn, derived from the job: its ranks agree on them without communication."""
    start = int.from_bytes(hashlib.sha256(token.encode()).digest()[:8], "big")
    span = LAST_PORT - FIRST_PORT
    return tuple(FIRST_PORT + (start + 257 * i) % span for i in range(NUM_PORTS))


def require(env: Mapping[str, str], names: Iterable[str], fix: str) -> None:
    """Refuses a set of variables of which some are missing."""
    missing = [name for name in names if name not in env]
    if missing:
        present = [name for name in names if name in env] or ["SLURM_STEP_ID"]
        raise UserError(f"{present[0]} is set but {', '.join(missing)} is not; {fix}")


def check_rank(rank_name: str, rank: int, size_name: str, size: int) -> None:
    """Raises if the rank is not below the number of ranks."""
    if not 0 <= rank < size:
        raise UserError(
            f"{rank_name}={rank} does not fit {size_name}={size}; use one launcher only"
        )


def check_part(part_name: str, part: int, whole_name: str, whole: int) -> None:
    """Refuses more ranks on a node, or more nodes, than there are ranks at all."""
    if part > whole:
        raise UserError(
            f"{part_name}={part} is more than {whole_name}={whole}; use one launcher only"
        )


def check_same(env: Mapping[str, str], name: str, other: str, launcher: str) -> None:
    """Raises if two variables for the same number differ; the launcher sets the second."""
    if name in env and other in env and env[name] != env[other]:
        raise UserError(
            f"{name}={env[name]} contradicts {other}={env[other]}; let {launcher} set the ranks "
            f"and unset {name}, or start torchrun inside"
        )


def check_hint(env: Mapping[str, str], name: str, value: int, other: str) -> None:
    """Raises if a job file's variable contradicts the launcher."""
    if name in env and read_whole(env, name) != value:
        raise UserError(
            f"{name}={env[name]} contradicts {other}={value}; unset {name} in the job file or "
            "make it the number of tasks"
        )


def expand_hostlist(hostlist: str) -> list[str]:
    """The hosts of SLURM's short form: rack[1-2]n[03-04],gpu7 gives five names.

    `scontrol show hostnames` does the same, but a container need not have it.
    """
    items = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", hostlist)
    if ",".join(items) != hostlist:
        raise UserError(f"cannot read the host list {hostlist!r}; is it SLURM's own?")
    return [host for item in items for host in _expand_item(item, hostlist)]


def tasks_on_node(tasks_per_node: str, node_rank: int) -> int:
    """How many tasks SLURM's short form 2(x3),1 puts on a node."""
    counts: list[int] = []
    for item in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if not match or int(match[1][:MAX_DIGITS]) == 0 or match[2] == "0":
            raise UserError(f"cannot read SLURM_STEP_TASKS_PER_NODE={tasks_per_node[:50]!r}")
        if len(item) > MAX_DIGITS or len(counts) + int(match[2] or 1) > MAX_HOSTS:
            raise UserError(f"SLURM_STEP_TASKS_PER_NODE={tasks_per_node[:50]!r} is absurdly large")
        counts.extend([int(match[1])] * int(match[2] or 1))
    return counts[node_rank] if node_rank < len(counts) else counts[-1]


def _expand_item(item: str, hostlist: str) -> list[str]:
    head, bracket, rest = item.partition("[")
    if not bracket:
        return [item]
    ranges, _, tail = rest.partition("]")
    names: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        is_range = match and len(part) <= MAX_DIGITS
        if not match or not is_range or int(match[1]) > int(match[2] or match[1]):
            raise UserError(f"cannot read the host list {hostlist!r}: {part!r} is not a range")
        if int(match[2] or match[1]) - int(match[1]) >= MAX_HOSTS:
            raise UserError(f"the host list {hostlist[:50]!r} is absurdly long")
        numbers = range(int(match[1]), int(match[2] or match[1]) + 1)
        names.extend(head + str(n).zfill(len(match[1])) for n in numbers)
    return [name + end for name in names for end in _expand_item(tail, hostlist)]
