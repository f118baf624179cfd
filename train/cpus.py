"""How many cores this process may really use, and how many of them are its own (no torch)."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path


def allowed_cpus(env: Mapping[str, str]) -> int:
    """Cores by affinity, cgroup quota and SLURM_CPUS_PER_TASK, whichever is least."""
    limits = [len(os.sched_getaffinity(0)), cgroup_cpus() or math.inf]
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


def cgroup_cpus(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The CPU quota of this cgroup in cores (v2 and v1), or None without one."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota_us = int((root / "cpu/cpu.cfs_quota_us").read_text())
        period_us = int((root / "cpu/cpu.cfs_period_us").read_text())
        return quota_us / period_us if quota_us > 0 else None
    except (OSError, ValueError):
        return None
