"""Finds the processes of the test SLURM, its jobs' included, without trusting any pid file."""

from __future__ import annotations

import os
from pathlib import Path

from tests.cluster.slurm.layout import CONF, HOME

DAEMONS = {"munged", "slurmctld", "slurmscriptd", "slurmd", "slurmstepd"}


def find_processes() -> list[int]:
    """The ids of the daemons and of the processes of jobs, without this one and those above it."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    spared = _this_and_above()
    return [pid for pid in pids if pid not in spared and _is_ours(Path(f"/proc/{pid}"))]


def _is_ours(process: Path) -> bool:
    try:
        if (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return False  # ended; only its parent can take it off the list
        name = (process / "comm").read_text().strip()
        return (name in DAEMONS and _holds_our_files(process)) or _is_of_job(process)
    except (OSError, IndexError):
        return False  # it ended meanwhile


def _holds_our_files(process: Path) -> bool:
    """A daemon overwrites its own name and environment, but not what it has open."""
    for link in (process / "cwd", *(process / "fd").iterdir()):
        try:
            if link.readlink().is_relative_to(HOME):
                return True
        except OSError:
            continue
    return False


def _is_of_job(process: Path) -> bool:
    """A shell in which someone exported SLURM_CONF has no job id, and stays."""
    variables = (process / "environ").read_bytes().split(b"\0")
    in_job = any(variable.startswith(b"SLURM_JOB_ID=") for variable in variables)
    return in_job and f"SLURM_CONF={CONF}".encode() in variables


def _this_and_above() -> set[int]:
    found = {os.getpid()}
    pid = os.getppid()
    while pid > 0:
        found.add(pid)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return found
