"""How much of the cores other processes used meanwhile: what tells a disturbed measurement."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class MachineLoad:
    """CPU time of the machine and of this process with all that it started, from now on.

    `servers` are processes of others that work for this one.
    """

    def __init__(self, servers: Collection[int] = ()) -> None:
        self._roots = {os.getpid(), *servers}
        self._begin_s, self._busy_s, self._own_s = time.monotonic(), busy_s(), own_s(self._roots)

    def foreign_share(self) -> float:
        """The share of all cores that went to others, the hypervisor's guests included."""
        cores_s = (time.monotonic() - self._begin_s) * (os.cpu_count() or 1)
        foreign_s = (busy_s() - self._busy_s) - (own_s(self._roots) - self._own_s)
        return max(0.0, foreign_s) / cores_s


def busy_s() -> float:
    """Seconds that all cores together have worked, or were kept from it, since the start."""
    user, nice, system, _idle, _wait, irq, softirq, steal = (
        int(field) for field in Path("/proc/stat").read_text().split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


def own_s(roots: Collection[int]) -> float:
    """CPU seconds of processes and their descendants, those that they have waited for included."""
    ticks, parents = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        pid = int(path.parent.name)
        parents[pid], ticks[pid] = int(fields[1]), sum(int(field) for field in fields[11:15])
    return sum(ticks[pid] for pid in ticks if _descends(pid, roots, parents)) / TICKS_PER_S


def _descends(pid: int, roots: Collection[int], parents: dict[int, int]) -> bool:
    while pid not in roots and pid:
        pid = parents.get(pid, 0)
    return pid in roots
