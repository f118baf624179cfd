"""How many cores this process may really use, and how many of them are its own (no torch)."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path


def allowed_cpus(env: Mapping[str, str]) -> int:
    """Cores by affinity, cgroup quota, SLURM_CPUS_PER_TASK and HTCondor slot, the least of all."""
    limits = [len(os.sched_getaffinity(0)), cgroup_cpus() or math.inf, slot_cpus(env) or math.inf]
    if env.get("SLURM_CPUS_PER_TASK", "").isdigit() and "SLURM_STEP_ID" in env:
        limits.append(int(env["SLURM_CPUS_PER_TASK"]))
    return max(1, int(min(limits)))


def cpus_of_rank(env: Mapping[str, str], local_world_size: int) -> int:
    """This rank's share: all it is allowed when it was bound, else an equal part of the node."""
    allowed = allowed_cpus(env)
    per_task = env.get("SLURM_CPUS_PER_TASK", "")
    is_bound = per_task.isdigit() and allowed <= int(per_task) and "SLURM_STEP_ID" in env
    is_bound &= "TORCHELASTIC_RUN_ID" not in env  # torchrun's ranks share the cores of one task
    machine = os.cpu_count() or 1
    if is_bound and allowed < machine:
        return allowed
    return max(1, min(allowed, machine) // local_world_size)


def slot_cpus(env: Mapping[str, str]) -> int | None:
    """The cores of the HTCondor slot by its machine ad; by default nothing else bounds a job."""
    try:
        lines = Path(env["_CONDOR_MACHINE_AD"]).read_text(errors="replace").splitlines()
    except (KeyError, OSError, ValueError):
        return None
    for name, _, value in (line.partition("=") for line in lines):
        if name.strip().lower() == "cpus" and value.strip().isdecimal():
            return int(value) or None
    return None


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
