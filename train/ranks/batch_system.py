"""Asks SLURM and HTCondor about this job: its time limit, its time in the queue, a requeue."""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from train.ranks.launch import Launch
from train.ranks.launch_variables import read_whole

log = logging.getLogger("trainyard")


def find_deadline(env: Mapping[str, str], launch: Launch) -> float | None:
    """The unix time at which SLURM will end this job, or None where there is no limit."""
    if launch.job.scheduler != "slurm":
        return None
    if env.get("SLURM_JOB_END_TIME", "").isdecimal():
        return float(env["SLURM_JOB_END_TIME"])
    seconds = parse_slurm_time(_ask_squeue(env["SLURM_JOB_ID"], "%L"))
    return None if seconds is None else time.time() + seconds


def queue_seconds(env: Mapping[str, str], launch: Launch) -> float | None:
    """How long this job waited in SLURM's queue before this start, or None if unknown."""
    if launch.job.scheduler != "slurm":
        return None
    submitted, _, started = _ask_squeue(env["SLURM_JOB_ID"], "%V %S").partition(" ")
    try:
        wait = datetime.fromisoformat(started) - datetime.fromisoformat(submitted)
    except ValueError:
        return None
    return max(0.0, wait.total_seconds())


def parse_slurm_time(text: str) -> float | None:
    """Seconds of SLURM's 1-02:03:04, 02:03:04 or 03:04; None for UNLIMITED and the like."""
    days, dash, clock = text.strip().rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in parts) or (dash and not days.isdecimal()):
        return None
    seconds = 0
    for part in parts:
        seconds = 60 * seconds + int(part)
    return float(seconds + 86400 * int(days or 0))


def requeue(launch: Launch) -> bool:
    """Whether SLURM requeued this job; called by rank 0, after the checkpoint."""
    if launch.job.requeue_id is None:
        return False
    command = ["scontrol", "requeue", launch.job.requeue_id]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("cannot requeue (%s): exit 85, start the same command again", error)
        return False
    if answer.returncode != 0:
        log.warning("scontrol requeue failed: %s; exit 85, start again", answer.stderr.strip())
        return False
    log.info("job %s is requeued and will continue from here", launch.job.requeue_id)
    return True


def exits_for_checkpoints(env: Mapping[str, str]) -> bool:
    """Whether HTCondor will restart this job when it exits 85: then a checkpoint is an exit."""
    ad = _read_ad(env.get("_CONDOR_JOB_AD"))
    return ad.get("successcheckpointexitcode") == "85"  # what checkpoint_exit_code becomes


def describe_slot(env: Mapping[str, str], launch: Launch) -> dict[str, object]:
    """The job's own names for the record: ids, and in an HTCondor slot the slot and the site."""
    record: dict[str, object] = {"kind": launch.job.scheduler, "job_id": launch.job.id}
    if launch.job.scheduler == "slurm":
        record["restart_count"] = read_whole(env, "SLURM_RESTART_COUNT", 0)
    if launch.job.scheduler == "condor":
        job = _read_ad(env.get("_CONDOR_JOB_AD"))
        machine = _read_ad(env.get("_CONDOR_MACHINE_AD"))
        record["job_id"] = f"{job.get('clusterid')}.{job.get('procid')}"
        record["slot"] = machine.get("name") or env.get("_CONDOR_SLOT")
        record["site"] = machine.get("glidein_resourcename")
        record["activation"] = job.get("numjobstarts")
    return record


def _read_ad(path: str | None) -> dict[str, str]:
    """The plain values of a ClassAd file, by lower-case name."""
    if path is None or not Path(path).is_file():
        return {}
    pairs = [line.partition("=") for line in Path(path).read_text(errors="replace").splitlines()]
    return {name.strip().lower(): value.strip().strip('"') for name, _, value in pairs}


def _ask_squeue(job_id: str, what: str) -> str:
    command = ["squeue", "--noheader", "--jobs", job_id, "--format", what]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
