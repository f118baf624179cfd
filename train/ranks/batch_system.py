"""The job around this process, as SLURM or HTCondor has it: ids, time limit, queue, requeue."""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from train.ranks.launch_variables import read_whole

log = logging.getLogger("trainyard")

SLURM_INTERACTIVE_STEP = "4294967290"  # the shell of salloc with use_interactive_step: not a launch


@dataclass(frozen=True)
class Job:
    """The scheduler's job around this process, whatever launched its ranks."""

    scheduler: str = "none"  # slurm, condor or none
    id: str | None = None
    requeue_id: str | None = None  # what `scontrol requeue` takes; None: never requeued by us


NO_JOB = Job()


def find_job(env: Mapping[str, str]) -> Job:
    """The job of this process; an HTCondor slot hides the SLURM job of its pilot."""
    if "_CONDOR_JOB_AD" in env:
        return Job("condor")
    if "SLURM_JOB_ID" not in env:
        return NO_JOB
    own_id = str(read_whole(env, "SLURM_JOB_ID"))  # names a folder, so it must be a number
    if env.get("SLURM_ARRAY_JOB_ID") and env.get("SLURM_ARRAY_TASK_ID"):
        array, task = (read_whole(env, f"SLURM_ARRAY_{kind}_ID") for kind in ("JOB", "TASK"))
        own_id = f"{array}_{task}"
    return Job("slurm", own_id, own_id)


def name_start(env: Mapping[str, str]) -> str:
    """Names this start of this job; with the restart count, so that no leftover is joined."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID")
    return "/".join(env.get(name, "") for name in names)


def is_slurm_step(env: Mapping[str, str]) -> bool:
    """Whether this is a task of a SLURM step, and not a job inside a pilot's step."""
    is_step = env.get("SLURM_STEP_ID", SLURM_INTERACTIVE_STEP) != SLURM_INTERACTIVE_STEP
    return is_step and "_CONDOR_JOB_AD" not in env


def find_deadline(env: Mapping[str, str], job: Job) -> float | None:
    """The unix time at which SLURM will end this job, or None where there is no limit."""
    if job.scheduler != "slurm":
        return None
    if env.get("SLURM_JOB_END_TIME", "").isdecimal():
        return float(env["SLURM_JOB_END_TIME"])
    seconds = parse_slurm_time(_ask_squeue(env["SLURM_JOB_ID"], "%L"))
    return None if seconds is None else time.time() + seconds


def queue_seconds(env: Mapping[str, str], job: Job) -> float | None:
    """How long this job waited in SLURM's queue before this start, or None if unknown."""
    if job.scheduler != "slurm":
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


def requeue(job: Job) -> bool:
    """Whether SLURM requeued this job; called by rank 0, after the checkpoint."""
    if job.requeue_id is None:
        return False
    command = ["scontrol", "requeue", job.requeue_id]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("cannot requeue (%s): exit 85, start the same command again", error)
        return False
    if answer.returncode != 0:
        log.warning("scontrol requeue failed: %s; exit 85, start again", answer.stderr.strip())
        return False
    log.info("job %s is requeued and will continue from here", job.requeue_id)
    return True


def exits_for_checkpoints(env: Mapping[str, str]) -> bool:
    """Whether HTCondor will restart this job when it exits 85: then a checkpoint is an exit."""
    ad = read_ad(env.get("_CONDOR_JOB_AD"))
    return ad.get("successcheckpointexitcode") == "85"  # what checkpoint_exit_code becomes


def describe_slot(env: Mapping[str, str], job: Job) -> dict[str, object]:
    """The job's own names for the record: ids, and in an HTCondor slot the slot and the site."""
    record: dict[str, object] = {"kind": job.scheduler, "job_id": job.id}
    if job.scheduler == "slurm":
        record["restart_count"] = read_whole(env, "SLURM_RESTART_COUNT", 0)
    if job.scheduler == "condor":
        ad = read_ad(env.get("_CONDOR_JOB_AD"))
        machine = read_ad(env.get("_CONDOR_MACHINE_AD"))
        record["job_id"] = f"{ad.get('clusterid')}.{ad.get('procid')}"
        record["slot"] = machine.get("name") or env.get("_CONDOR_SLOT")
        record["site"] = machine.get("glidein_resourcename")
        record["activation"] = ad.get("numjobstarts")
    return record


def read_ad(path: str | None) -> dict[str, str]:
    """The plain values of a ClassAd file, by lower-case name; none where it cannot be read."""
    try:
        lines = Path(path or "").read_text(errors="replace").splitlines()
    except (OSError, ValueError):
        return {}
    pairs = [line.partition("=") for line in lines]
    return {name.strip().lower(): value.strip().strip('"') for name, _, value in pairs}


def _ask_squeue(job_id: str, what: str) -> str:
    command = ["squeue", "--noheader", "--jobs", job_id, "--format", what]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
