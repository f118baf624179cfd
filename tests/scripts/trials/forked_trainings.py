"""Trials of a search as real trainings, forked from a process that has torch already."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from scripts.jobs.submit import log_folder
from scripts.jobs.train_run import TrainRun
from tests.scripts.trials.stand_in import Jobs, StartedJob
from tests.train import started_ranks as ranks


class ForkedTrainings(Jobs):
    """The jobs of a search; they outlive it, as a scheduler's do."""

    def __init__(self) -> None:
        self._jobs: dict[str, ranks.Job] = {}
        self._runs: dict[str, Path] = {}

    def submit(self, _place: object, run: TrainRun, folder: Path, _slot: int) -> StartedJob:
        job_id = str(10**7 + len(self._jobs))
        logs = log_folder(folder, run)
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"{job_id}_0_log.out"
        self._jobs[job_id] = ranks.start(list(run.argv), log)
        self._runs[job_id] = folder / run.name
        return StartedJob(job_id)

    def adopt(self, _cluster: str, run: TrainRun, folder: Path) -> str | None:
        found = [i for i, name in self._runs.items() if name == folder / run.name]
        return next((job_id for job_id in found if self.is_alive(job_id)), None)

    def cancel(self, _cluster: str, job_ids: Sequence[str]) -> None:
        for job_id in job_ids:
            self._jobs[job_id].send(signal.SIGTERM)
        for job_id in job_ids:
            self._jobs[job_id].wait()

    def is_alive(self, job_id: str) -> bool:
        return self._jobs[job_id].is_alive()
