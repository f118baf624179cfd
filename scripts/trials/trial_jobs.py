"""The jobs of a search's trials: each has a slot of its own, and is submitted once, kill or not."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from dataset.errors import PassingError, UserError
from report.search.trials import Trial
from scripts.jobs.submit import adopt_job, submit_local, submit_slurm
from scripts.jobs.train_run import TrainRun
from scripts.trials.results import describe_params
from scripts.trials.search_file import SearchPlan, trial_run
from scripts.trials.store import Store

log = logging.getLogger("trainyard")
MAX_REFUSALS = 60  # by sbatch in a row, 5 s apart, while no trial runs that would make room


class TrialJobs:
    """What this search.py started, and which of plan.jobs slots each trial with a job has."""

    def __init__(self, folder: Path, plan: SearchPlan, store: Store) -> None:
        self._folder, self._plan, self._store = folder, plan, store
        self.num_starts: Counter[int] = Counter()
        self.slots: dict[int, int] = {}  # on this machine, trials in different ones have other GPUs
        self._num_refused = 0  # submissions in a row, while nothing ran

    def note_busy(self, busy: Collection[int]) -> None:
        """Frees the slots of jobs that ended; those of an earlier search.py's jobs are taken."""
        self.slots = {number: slot for number, slot in self.slots.items() if number in busy}
        for number in sorted(set(busy) - self.slots.keys()):
            self.slots[number] = self._find_slot(self._store.trials[number])

    def start(self, trial: Trial) -> None:
        """Submits the trial's training, unless a job of a search that was killed has it."""
        run = trial_run(self._plan, trial, self._folder)
        job_id, slot = adopt_job(self._plan.cluster, run, self._folder), self._find_slot(trial)
        if job_id is None:
            slot = self._free_slot(trial)
            trial = self._store.save(replace(trial, slot=slot))  # first: the job may outlive us
            job_id = self._submit(run, slot)
            log.info("%s  starts: %s", trial.name, describe_params(trial))
        self.num_starts[trial.number] += 1
        self.slots[trial.number] = slot
        self._store.save(trial.with_job(str(job_id)))

    def _submit(self, run: TrainRun, slot: int) -> str:
        """The id of the run's job; PassingError for a refusal that may be about other jobs.

        The first job may be a wrong one. Later its like were accepted, or others are running: then
        there may be a limit of jobs.
        """
        if self._plan.cluster == "local":
            return submit_local(self._plan.place, run, self._folder, slot).job_id
        try:
            (job_id,) = submit_slurm(self._plan.place, [run], self._folder)
        except UserError as error:
            self._num_refused = 0 if self.slots else self._num_refused + 1
            if not self.slots and (not self.num_starts or self._num_refused > MAX_REFUSALS):
                raise
            raise PassingError(str(error)) from None
        self._num_refused = 0
        return job_id

    def _find_slot(self, trial: Trial) -> int:
        """The slot of a trial that has a job."""
        return self._free_slot(trial) if trial.slot is None else trial.slot

    def _free_slot(self, trial: Trial) -> int:
        """A slot for a trial; if possible none of another whose job may still be found."""
        taken = set(self.slots.values())
        others = [t for t in self._store.trials.values() if t.number != trial.number]
        noted = {other.slot for other in others if not other.is_over}
        free = set(range(max(self._plan.jobs, len(taken) + 1))) - taken
        return min(free, key=lambda slot: (slot in noted, slot))
