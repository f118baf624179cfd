"""How many cores this process may really use, and how many of them are its own (no torch)."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import NamedTuple

from train.ranks.batch_system import read_ad

SPIN_COUNT = "1000"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Binding(NamedTuple):
    """The cores that a process may run on, and which machine's they are."""

    machine: str
    cores: frozenset[int]


def settle_openmp(env: MutableMapping[str, str]) -> None:
    """Sets how torch's threads share cores with others; OpenMP reads it when torch is imported.

    HTCondor sets OMP_THREAD_LIMIT to the slot's CPUs. With 1, seen on a pool, the first backward
    pass never ends: torch runs it in a second thread, to which libgomp grants none. And threads
    that wait for each other must soon sleep: libgomp's spin 300,000 times by default, and use up
    the time of the one that they wait for where cores are shared, with other jobs or with our own
    loader. A thousand times is as quick on idle cores, and several times quicker on busy ones;
    not to spin at all (OMP_WAIT_POLICY=passive) was slower on idle ones.
    """
    env.pop("OMP_THREAD_LIMIT", None)
    if "OMP_WAIT_POLICY" not in env:
        env.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def allowed_cpus(env: Mapping[str, str]) -> int:
    """The smallest of affinity, cgroup quota, SLURM_CPUS_PER_TASK and the HTCondor slot's cores."""
    limits = [len(os.sched_getaffinity(0)), cgroup_cpus() or math.inf, slot_cpus(env) or math.inf]
    limits.append(task_cpus(env) or math.inf)
    return max(1, int(min(limits)))


def cpus_of_rank(
    env: Mapping[str, str], local_world_size: int, num_sharing: int | None = None
) -> int:
    """This rank's share of the cores; num_sharing ranks (None: all on the node) use its cores.

    A cgroup's quota and a slot's cores are for all ranks of the node, however they are bound.
    """
    bound = len(os.sched_getaffinity(0)) // (num_sharing or local_world_size)
    for_all = [cgroup_cpus() or math.inf, slot_cpus(env) or math.inf]
    own = task_cpus(env) or math.inf
    if "TORCHELASTIC_RUN_ID" in env:  # torchrun's ranks share the cores of one task
        for_all, own = [*for_all, own], math.inf
    return max(1, int(min(bound, own, min(for_all) / local_world_size)))


def own_binding() -> Binding:
    """This process's cores, and the machine's boot id: containers have host names of their own."""
    try:
        machine = BOOT_ID.read_text().strip()
    except OSError:
        machine = os.uname().nodename
    return Binding(machine, frozenset(os.sched_getaffinity(0)))


def count_sharing(own: Binding, all_ranks: Sequence[Binding]) -> int:
    """How many ranks, this one included, may run on a core of this rank."""
    beside = [other for other in all_ranks if other.machine == own.machine]
    return sum(not own.cores.isdisjoint(other.cores) for other in beside)


def task_cpus(env: Mapping[str, str]) -> int | None:
    """The cores per task of a SLURM step, or None if they were not set."""
    per_task = env.get("SLURM_CPUS_PER_TASK", "")
    return int(per_task) or None if per_task.isdecimal() and "SLURM_STEP_ID" in env else None


def slot_cpus(env: Mapping[str, str]) -> int | None:
    """The cores of the HTCondor slot by its machine ad; often nothing else limits a job."""
    cpus = read_ad(env.get("_CONDOR_MACHINE_AD")).get("cpus", "")
    return int(cpus) or None if cpus.isdecimal() else None


def cgroup_cpus(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> float | None:
    """The CPU quota of this cgroup (v2: and of those around it) in cores, or None without one."""
    here = root / _own_cgroup(own)
    folders = [here, *(folder for folder in here.parents if folder.is_relative_to(root))]
    quotas = [quota for quota in map(_quota_of, folders) if quota is not None]
    if quotas:
        return None if min(quotas) == math.inf else min(quotas)
    try:
        quota_us = int((root / "cpu/cpu.cfs_quota_us").read_text())
        period_us = int((root / "cpu/cpu.cfs_period_us").read_text())
        return quota_us / period_us if quota_us > 0 else None
    except (OSError, ValueError):
        return None


def _own_cgroup(own: Path) -> str:
    """This process's cgroup of v2 below the root; empty in a namespace of its own."""
    try:
        lines = own.read_text().splitlines()
    except (OSError, ValueError):
        return ""
    path = next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
    return "" if ".." in path.split("/") else path  # outside of this namespace


def _quota_of(folder: Path) -> float | None:
    """The cores that cpu.max of a cgroup allows, or None without such a file."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None
