"""SLURM's short forms: rack[1-2]n[03-04],gpu7 for hosts and 2(x3),1 for tasks per node."""

from __future__ import annotations

import re

from dataset.errors import UserError

MAX_HOSTS = 1_000_000
MAX_DIGITS = 40  # of one item: numbers of 5,000 digits do not count hosts


def expand_hostlist(hostlist: str) -> list[str]:
    """The hosts of SLURM's short form: rack[1-2]n[03-04],gpu7 gives five names."""
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
