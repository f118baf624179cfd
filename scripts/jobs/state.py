"""How far each training is, from its run.json and its job, and what its log says."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataset.errors import CommandError
from report.record_shape import is_number, shape_record, to_positive, to_whole
from scripts.jobs.submit import is_local_alive, log_folder, slurm_end, slurm_states
from scripts.jobs.train_run import TrainRun
from train.records.record import EPOCHS_FILE, RUN_FILE, read_epochs, read_run

log = logging.getLogger("trainyard")
LOG_LINES = 6
POLL_S = {"local": 0.5, "slurm": 5.0}  # between two looks of whoever waits, by cluster
# How a job ended: SLURM's word -> ours.
_ENDS = {
    "BOOT_FAIL": "its node did not start",
    "CANCELLED": "was cancelled",
    "DEADLINE": "reached its deadline",
    "NODE_FAIL": "its node failed",
    "OUT_OF_MEMORY": "ran out of memory",
    "PREEMPTED": "was preempted",
    "TIMEOUT": "reached its time limit",
}


@dataclass(frozen=True)
class RunState:
    """One run now: done, running, queued, stopped (can go on), failed, or missing."""

    run: TrainRun
    state: str
    detail: str
    job_id: str | None
    exit_code: int | None = None

    @property
    def is_active(self) -> bool:
        return self.state in ("running", "queued")


def find_states(
    cluster: str, runs: Sequence[TrainRun], jobs: Mapping[str, str], folder: Path
) -> list[RunState]:
    """The state of every run, given the last job of each that had one."""
    wanted = [jobs[run.name] for run in runs if run.name in jobs]
    if cluster == "slurm":
        active = slurm_states(wanted) if wanted else {}
    else:
        active = {job: "RUNNING" for job in wanted if is_local_alive(job)}
    return [_state_of(cluster, run, folder, jobs.get(run.name), active) for run in runs]


def _state_of(
    cluster: str, run: TrainRun, folder: Path, job_id: str | None, active: Mapping[str, str]
) -> RunState:
    record = _read(folder / run.name)
    status, code = record.get("status"), record.get("exit_code")
    if job_id is not None and job_id in active:
        word, _, reason = active[job_id].partition(" ")
        if word == "PENDING":
            # SLURM says None before it has looked at the job for the first time.
            why = f"waiting: {reason}" if reason not in ("", "None") else "waiting for SLURM"
            return RunState(run, "queued", why, job_id)
        return RunState(run, "running", _progress(folder / run.name, record), job_id)
    if status == "done":
        return RunState(run, "done", _progress(folder / run.name, record), job_id, 0)
    if job_id is None:
        detail = "not submitted yet" if cluster == "slurm" else "not started yet"
        return RunState(run, "missing", detail, None)
    if _is_older(folder / run.name / RUN_FILE, log_folder(folder, run), job_id):
        return RunState(run, "failed", "ended before it could resume its run", job_id)
    if status == "checkpointed":
        return RunState(run, "stopped", "has a checkpoint and can be resumed", job_id, code)
    ended = slurm_end(job_id) if cluster == "slurm" else ""
    if status == "running" or (status is None and ended in ("CANCELLED", "PREEMPTED")):
        return RunState(run, "stopped", _ENDS.get(ended, "was killed"), job_id, code)
    how = f" ({_ENDS[ended]})" if ended in _ENDS else ""
    detail = f"exit {code}" if code is not None else f"ended without a record{how}"
    return RunState(run, "failed", detail, job_id, code)


def _read(folder: Path) -> dict[str, Any]:
    """The run's record, or an empty one while there is none."""
    try:
        record = read_run(folder) if (folder / RUN_FILE).exists() else {}
    except CommandError:
        return {}
    shaped, _ = shape_record(record)
    return shaped


def _is_older(run_file: Path, logs: Path, job_id: str) -> bool:
    """Whether the record is an earlier job's: the last job wrote nothing."""
    submitted = logs / f"{job_id}_submitted.pkl"
    if not run_file.exists() or not submitted.exists():
        return False
    return run_file.stat().st_mtime < submitted.stat().st_mtime


def _progress(folder: Path, record: Mapping[str, Any]) -> str:
    """How far the trainer is, in its epochs."""
    total = to_whole((record.get("config") or {}).get("epochs"))
    epochs = read_epochs(folder) if (folder / EPOCHS_FILE).exists() else []
    if not epochs:
        return "starting" if record.get("status") != "done" else ""
    last = epochs[-1]
    words = [f"epoch {last['epoch'] + 1}" + (f" of {total}" if total else "")]
    if is_number(last.get("val_acc1")):
        words.append(f"val acc@1 {last['val_acc1']:.1f} %")
    if to_positive(last.get("images_per_s")):
        words.append(f"{last['images_per_s']:.0f} images/s")
    return ", ".join(words)


def log_tail(state: RunState, folder: Path) -> list[str]:
    """The last log lines of a run's last job, from the first rank that logged an error."""
    logs = sorted(log_folder(folder, state.run).glob(f"{state.job_id}_*_log.out"))
    texts = [path.read_text(errors="replace").splitlines() for path in logs]
    with_error = [text for text in texts if any("rror" in line for line in text[-LOG_LINES:])]
    return (with_error or texts or [[]])[0][-LOG_LINES:]


class LogFollower:
    """The lines that rank 0 of a job adds to its log, for a person who waits."""

    def __init__(self, folder: Path, run: TrainRun, job_id: str) -> None:
        self._path = log_folder(folder, run) / f"{job_id}_0_log.out"
        self._offset = 0

    def read_new_lines(self) -> list[str]:
        """The whole lines since the last call, without submitit's own."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            text, _, _ = file.read().rpartition(b"\n")
        self._offset += len(text) + 1 if text else 0
        lines = text.decode(errors="replace").splitlines()
        return [line for line in lines if line and not line.startswith("submitit")]


class StateLog:
    """Logs each change of a run's state once, for a person who waits."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[str, str]] = {}

    def say_change(self, state: RunState) -> None:
        now = (state.state, state.detail)
        if self._said.get(state.run.name) != now:
            self._said[state.run.name] = now
            detail = f": {state.detail}" if state.detail else ""
            log.info("%s  %s%s", state.run.name, state.state, detail)
