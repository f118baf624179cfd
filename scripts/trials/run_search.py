"""A search from its first trial to its best: ask, start, watch, stop the hopeless, conclude."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from dataset.errors import (
    DIVERGED,
    DONE,
    TRY_AGAIN,
    USER_MISTAKE,
    CommandError,
    PassingError,
    UserError,
)
from report.search.tables import trial_table
from report.search.trials import Trial, find_best
from report.table import Table, to_markdown
from report.words import count
from scripts.jobs.run_folder import only_one
from scripts.jobs.state import RunState, StateLog, find_states, log_tail
from scripts.jobs.submit import adopt_job, cancel_jobs, reap, submit_local, submit_slurm
from scripts.trials.results import (
    ENOUGH_FAILURES,
    best_command,
    describe_params,
    drop_losers,
    find_end,
    read_metric,
)
from scripts.trials.search_file import CONDOR, SearchPlan, read_search, trial_run, write_search
from scripts.trials.store import Store, read_trials
from train.config import parse_config

log = logging.getLogger("trainyard")
POLL_S = {"local": 0.5, "slurm": 5.0}
MAX_STARTS = 3  # of one trial that is stopped again and again, by one search.py
CANCELLED = "cancelled"  # a file: the search that runs starts nothing more, and ends


def run_search(folder: Path, plan: SearchPlan) -> int:
    """Runs the trials that are missing and prints the best of all."""
    refuse_dag(folder, plan)
    with only_one(folder) as has_lock:
        write_search(folder, plan)
        (folder / CANCELLED).unlink(missing_ok=True)
        store = Store(folder, plan, has_lock)
        loop = _SearchLoop(folder, plan, store)
        loop.go()
        return _conclude(folder, plan, list(store.trials.values()), loop.first_code)


class _SearchLoop:
    """The trials that run, and what is decided about each, until none is left."""

    def __init__(self, folder: Path, plan: SearchPlan, store: Store) -> None:
        self._folder, self._plan, self._store = folder, plan, store
        failed = sum(trial.state == "failed" for trial in store.trials.values())
        self._last = plan.trials + failed  # each that failed in an earlier start gets a substitute
        self._starts: Counter[int] = Counter()
        self._slots: dict[int, int] = {}  # of trials with a job: which of plan.jobs places it has
        self._ended_well = len(store.trials) > failed
        self._num_failed = 0
        self.first_code = TRY_AGAIN  # of the first trial that failed
        self._log = StateLog()

    def go(self) -> None:
        """Runs to the end; what is under way is stopped with a checkpoint if this ends early."""
        log.info("search %s: %s", self._folder, count(self._plan.trials, "trial"))
        over = [trial for trial in self._store.trials.values() if trial.is_over]
        _cancel_trials(self._plan, over, self._folder)  # a kill came between verdict and end
        try:
            while self._tick():
                time.sleep(POLL_S[self._plan.cluster])
        except KeyboardInterrupt:
            self._say_interrupted()
            raise
        except CommandError:
            cancel_search(self._folder)
            raise

    def _tick(self) -> bool:
        """Looks at everything once; False when nothing runs and nothing is left to start."""
        try:
            states = self._find_states()
        except PassingError as error:  # SLURM's controller may be down for a while
            log.warning("%s", error)
            return True
        busy = {number for number, state in states.items() if state.is_active}
        self._slots = {number: slot for number, slot in self._slots.items() if number in busy}
        for number, state in states.items():
            self._look_at(self._store.trials[number], state)
        drop_losers(self._plan, list(self._store.trials.values()), busy, self._folder)
        try:
            num_started = self._start_more(busy, states)
        except PassingError as error:
            log.warning("%s", error)
            return True
        return bool(busy) or num_started > 0

    def _find_states(self) -> dict[int, RunState]:
        """The state of each trial whose job may run or must run: not of those known to be over."""
        trials = [
            t for t in self._store.trials.values() if not t.is_over or t.number in self._slots
        ]
        for trial in trials if self._plan.cluster == "local" else ():
            for job_id in trial.jobs[-1:]:
                reap(int(job_id))
        states = _find_states(self._plan, trials, self._folder)
        return {trial.number: state for trial, state in zip(trials, states, strict=True)}

    def _look_at(self, trial: Trial, state: RunState) -> None:
        """Tells Optuna how far the trial is, and what became of it."""
        if trial.is_over:
            return
        if state.is_active:
            self._slots.setdefault(trial.number, self._free_slot())
        if state.state != "missing":
            self._log.say_change(state)
        values = read_metric(self._folder / trial.name, self._plan.metric)
        is_hopeless = False
        if values.keys() - trial.reports.keys():
            num_epochs = parse_config(list(state.run.argv)).epochs
            trial, is_hopeless = self._store.report(trial, values, num_epochs)
        if state.state == "done":
            self._end(trial, *find_end(trial, self._plan.metric))
        elif state.state == "failed" and not self._may_go_on(trial, state):
            self._end_failed(trial, state)
        elif is_hopeless and state.is_active:
            self._end(trial, "pruned", values[max(values)], "was behind the others")
            cancel_jobs(self._plan.cluster, [trial.jobs[-1]])

    def _may_go_on(self, trial: Trial, state: RunState) -> bool:
        """Whether a job that failed is worth another: a passing failure, or one without a record
        that ended together with an earlier search.py, when all was killed at once."""
        if state.exit_code is None:
            return self._starts[trial.number] == 0
        return state.exit_code == TRY_AGAIN

    def _end_failed(self, trial: Trial, state: RunState) -> None:
        if state.exit_code == DIVERGED:  # a result too: the sampler must keep away from there
            self._end(trial, "pruned", None, "diverged")
            return
        self._end(trial, "failed", None, state.detail)
        self._num_failed += 1
        if self._num_failed == 1:
            self.first_code = state.exit_code or USER_MISTAKE
            for line in log_tail(state, self._folder):
                log.error("    %s", line)

    def _end(self, trial: Trial, name: str, value: float | None, note: str = "") -> None:
        ended = self._store.end(trial, name, value, note)
        self._ended_well = self._ended_well or name != "failed"
        best = find_best(list(self._store.trials.values()), self._plan.metric)
        result = "" if value is None else f" {self._plan.metric} {value:.4g}"
        so_far = f"; best so far {best.value:.4g} ({best.name})" if best else ""
        why = f" ({note})" if note else ""
        log.info("%s  %s%s%s%s", ended.name, ended.state, result, why, so_far)

    def _start_more(self, busy: set[int], states: dict[int, RunState]) -> int:
        """Starts trials while there is room; those that were running before come first."""
        if (self._folder / CANCELLED).exists():
            return 0
        num_started = 0
        for number in range(self._last):
            if len(busy) + num_started >= self._plan.jobs or self._is_stuck:
                break
            trial = self._store.trials.get(number)
            if (trial and trial.is_over) or number in busy:
                continue
            if self._starts[number] < MAX_STARTS:
                self._start(self._store.ask(number))
                num_started += 1
        return num_started

    @property
    def _is_stuck(self) -> bool:
        return not self._ended_well and self._num_failed >= ENOUGH_FAILURES

    def _start(self, trial: Trial) -> None:
        """Submits the trial's training, unless a job of a search that was killed has it."""
        run, slot = trial_run(self._plan, trial, self._folder), self._free_slot()
        job_id = adopt_job(self._plan.cluster, run, self._folder)
        self._starts[trial.number] += 1
        if job_id is None:
            log.info("%s  starts: %s", trial.name, describe_params(trial))
            if self._plan.cluster == "local":
                job_id = submit_local(self._plan.place, run, self._folder, slot).job_id
            else:
                (job_id,) = submit_slurm(self._plan.place, [run], self._folder)
        self._slots[trial.number] = slot
        self._store.save(trial.with_job(str(job_id)))

    def _free_slot(self) -> int:
        taken = set(self._slots.values())
        return next(slot for slot in range(len(taken) + 1) if slot not in taken)

    def _say_interrupted(self) -> None:
        if self._plan.cluster == "local":
            log.info("stopping %s with a checkpoint ...", count(len(self._slots), "trial"))
            cancel_search(self._folder)
        else:
            log.info("the jobs keep running; stop them with: search.py cancel %s", self._folder)
        log.info("continue with: search.py resume %s", self._folder)


def _conclude(folder: Path, plan: SearchPlan, trials: list[Trial], first_code: int) -> int:
    """The table, the command of the best, and the exit code."""
    print(to_markdown(trial_table(trials, plan.metric, f"search {folder}")))
    num_over = sum(trial.state in ("complete", "pruned") for trial in trials)
    command = best_command(plan, trials, folder)
    if command:
        print(f"the command that trains the best (--epochs N for longer):\n\n    {command}\n")
    if num_over >= plan.trials:
        return DONE if command else DIVERGED  # all of them diverged: nothing to choose from
    log.error("%d of %s have a result; run the others with: search.py resume %s",
              num_over, count(plan.trials, "trial"), folder)  # fmt: skip
    return first_code


def ask_search(folder: Path) -> Table:
    """The trials, and where those that run are."""
    plan, trials = read_search(folder), list(read_trials(folder).values())
    if plan.cluster == CONDOR:  # condor_q -dag knows its jobs
        return trial_table(trials, plan.metric, f"search {folder}")
    running = [trial for trial in trials if not trial.is_over]
    states = _find_states(plan, running, folder)
    details = {
        trial.number: f"{state.state}: {state.detail}"
        for trial, state in zip(running, states, strict=True)
    }
    return trial_table(trials, plan.metric, f"search {folder}", details)


def cancel_search(folder: Path) -> int:
    """Ends the trials that run, and the search that waits for them; returns how many there were."""
    refuse_dag(folder, plan := read_search(folder))
    (folder / CANCELLED).touch()
    return _cancel_trials(plan, list(read_trials(folder).values()), folder)


def refuse_dag(folder: Path, plan: SearchPlan) -> None:
    """Raises for a search whose trials are nodes of a DAG."""
    if plan.cluster == CONDOR:
        raise UserError(
            f"{folder} is run by a DAG: continue it with `condor_submit_dag study.dag` in "
            f"{folder.parent}, stop it with condor_rm"
        )


def _cancel_trials(plan: SearchPlan, trials: Sequence[Trial], folder: Path) -> int:
    states = _find_states(plan, [trial for trial in trials if trial.jobs], folder)
    job_ids = [str(state.job_id) for state in states if state.is_active]
    cancel_jobs(plan.cluster, job_ids)
    return len(job_ids)


def _find_states(plan: SearchPlan, trials: Sequence[Trial], folder: Path) -> list[RunState]:
    runs = [trial_run(plan, trial, folder) for trial in trials]
    jobs = {trial.name: trial.jobs[-1] for trial in trials if trial.jobs}
    return find_states(plan.cluster, runs, jobs, folder)
