"""Trainings that only write records, for tests in which any training does.

A real one takes seconds, and a search has many. These write one epoch whenever the search looks at
them, of an accuracy that follows from their flags. What they are about lies on the disk, so they
go on when the search that started them is killed, as real jobs do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dataset.durable import write_json
from dataset.errors import CHECKPOINTED, DIVERGED
from scripts.jobs import state
from scripts.jobs.submit import log_folder
from scripts.jobs.train_run import TrainRun
from scripts.trials import run_search, trial_jobs
from tests.report.records import epoch_record, run_record
from train.config import TrainConfig, parse_config
from train.records.record import EPOCHS_FILE, RUN_FILE, append_line, read_epochs

SPACE = "lr=log:0.01..10, label_smoothing=0..0.2"
FLAGS = ("--dummy", "-b", "8", "--epochs", "3")

Fate = Callable[[TrainConfig], str]


def accuracy(config: TrainConfig, epoch: int) -> float:
    """The made-up accuracy after an epoch, counted from 1: best at a rate of 0.3."""
    distance = math.log10(config.lr or 1.0) - math.log10(0.3)
    return (90 - 20 * distance**2 - (config.label_smoothing or 0.0)) * (1 - 0.5**epoch)


@dataclass(frozen=True)
class StartedJob:
    job_id: str


class Jobs:
    """Takes the place of scripts/jobs/submit.py in a search."""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(trial_jobs, "submit_local", self.submit)
        monkeypatch.setattr(trial_jobs, "submit_slurm", self.submit_slurm)
        monkeypatch.setattr(trial_jobs, "adopt_job", self.adopt)
        monkeypatch.setattr(run_search, "cancel_jobs", self.cancel)
        monkeypatch.setattr(run_search, "reap", lambda _: None)
        monkeypatch.setattr(state, "is_local_alive", self.is_alive)
        monkeypatch.setattr(state, "slurm_states", self.slurm_states)
        monkeypatch.setattr(state, "slurm_end", lambda _: "")

    def submit_slurm(self, place: object, runs: Sequence[TrainRun], folder: Path) -> list[str]:
        return [self.submit(place, run, folder, 0).job_id for run in runs]

    def slurm_states(self, job_ids: Sequence[str]) -> dict[str, str]:
        return {job_id: "RUNNING" for job_id in job_ids if self.is_alive(job_id)}

    def submit(self, _place: object, run: TrainRun, folder: Path, _slot: int) -> StartedJob:
        raise NotImplementedError

    def adopt(self, _cluster: str, run: TrainRun, _folder: Path) -> str | None:
        raise NotImplementedError

    def cancel(self, _cluster: str, job_ids: Sequence[str]) -> None:
        raise NotImplementedError

    def is_alive(self, job_id: str) -> bool:
        raise NotImplementedError


class StandIn(Jobs):
    """The jobs of one search; what they are about is kept in a folder."""

    def __init__(self, folder: Path, fate: Fate | None = None) -> None:
        self._folder = folder
        self._fate = fate or (lambda _: "done")
        folder.mkdir(exist_ok=True)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().install(monkeypatch)
        monkeypatch.setattr(run_search, "POLL_S", {"local": 0.0, "slurm": 0.0})

    @property
    def started(self) -> list[str]:
        """The outputs of all jobs so far, in the order of their start."""
        files = sorted(self._folder.glob("*.json"), key=lambda path: int(path.stem))
        return [Path(json.loads(file.read_text())["output"]).name for file in files]

    def submit(self, _place: object, run: TrainRun, folder: Path, _slot: int) -> StartedJob:
        job_id = str(10**7 + len(list(self._folder.glob("*.json"))))  # above what the kernel gives
        config = parse_config(list(run.argv))
        assert config.output is not None
        output = config.output.absolute()
        job = {"argv": run.argv, "output": str(output), "state": "running"}
        write_json(self._folder / f"{job_id}.json", job)
        logs = log_folder(folder, run)
        logs.mkdir(parents=True, exist_ok=True)
        (logs / f"{job_id}_0_log.out").write_text(f"log of {run.name}\n")
        return StartedJob(job_id)

    def adopt(self, _cluster: str, run: TrainRun, _folder: Path) -> str | None:
        for path in self._folder.glob("*.json"):
            job = json.loads(path.read_text())
            if job["state"] == "running" and Path(job["output"]).name == run.name:
                return path.stem
        return None

    def cancel(self, _cluster: str, job_ids: Sequence[str]) -> None:
        for job_id in job_ids:
            self._end(job_id, "checkpointed", CHECKPOINTED)

    def is_alive(self, job_id: str) -> bool:
        """Whether the job runs; it trains an epoch before it answers."""
        path = self._folder / f"{job_id}.json"
        job = json.loads(path.read_text())
        if job["state"] != "running":
            return False
        self._train(job_id, job)
        return bool(json.loads(path.read_text())["state"] == "running")

    def _train(self, job_id: str, job: dict[str, Any]) -> None:
        output, config = Path(job["output"]), parse_config(job["argv"])
        fate = self._fate(config)
        if fate == "killed":
            self._end(job_id, "running", None)
        elif fate == "no record":
            write_json(self._folder / f"{job_id}.json", job | {"state": "ended"})
        elif fate == "failed":
            self._end(job_id, "failed", 1)
        elif fate == "diverged":
            self._end(job_id, "failed", DIVERGED)
        elif len(read_epochs(output)) == config.epochs:  # the search was killed below
            self._end(job_id, "done", 0)
        else:
            done = len(read_epochs(output))
            record = epoch_record(done, 1.0) | {"val_acc1": accuracy(config, done + 1)}
            if fate == "no metric":
                record = {name: value for name, value in record.items() if "val_" not in name}
            append_line(output / EPOCHS_FILE, record)
            (output / "ckpt").mkdir(exist_ok=True)
            (output / "ckpt" / "best.pt").write_text("weights")
            if done + 1 == config.epochs:
                self._end(job_id, "done", 0)

    def _end(self, job_id: str, status: str, code: int | None) -> None:
        path = self._folder / f"{job_id}.json"
        job = json.loads(path.read_text())
        record = run_record(Path(job["output"]).name, status=status, exit_code=code)
        write_json(Path(job["output"]) / RUN_FILE, record)
        write_json(path, job | {"state": "ended"})
