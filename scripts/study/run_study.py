"""A study from its first submission to its table: run, wait, conclude, ask, cancel."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from dataset.errors import CRASH, DONE, TRY_AGAIN, CommandError, PassingError
from report.runs import load_runs
from report.scaling import build_studies
from report.scaling_tables import scaling_table
from report.table import Table, to_markdown, to_writable
from report.words import count
from scripts.jobs.run_folder import only_one
from scripts.jobs.state import POLL_S, LogFollower, RunState, StateLog, find_states, log_tail
from scripts.jobs.submit import cancel_jobs, cancel_local, submit_local, submit_slurm
from scripts.jobs.train_run import TrainRun
from scripts.study.microbatch import find_microbatches, share_microbatch
from scripts.study.plan import StudyRun, describe_pin, make_runs
from scripts.study.state_table import state_table
from scripts.study.study_file import StudyFile, read_study, write_study

log = logging.getLogger("trainyard")


def run_study(study: StudyFile, folder: Path, wait: bool) -> int:
    """Submits what is missing, waits for it, and prints the table."""
    with only_one(folder):
        write_study(folder, study)
        while True:
            study = share_microbatch(study, folder)
            states = _run_missing(study, folder, wait)
            if states is None:
                return DONE
            study = read_study(folder)
            if not find_microbatches(study, folder):
                break
    return _conclude(states, folder)


def _run_missing(study: StudyFile, folder: Path, wait: bool) -> list[RunState] | None:
    """The states of the runs once all that were missing have ended; None: not waited for."""
    runs = make_runs(study.plan, folder)
    log.info("study %s: %s", folder, count(len(runs), "run"))
    if pin := describe_pin(study.plan, folder):
        log.info("%s", pin)
    if study.plan.cluster == "local":
        study = _run_local(study, runs, folder)
    else:
        study = _submit_missing(study, runs, folder)
        if not wait:
            log.info("submitted; see how far it is with: scaling_study.py status %s", folder)
            return None
        _wait_for_slurm(study, runs, folder)
    return _find_states(study, runs, folder)


def _run_local(study: StudyFile, runs: list[StudyRun], folder: Path) -> StudyFile:
    """Starts the runs one after another, since they share the machine."""
    log_of = StateLog()
    for state in _find_states(study, runs, folder):
        if state.state != "missing":  # it is about to start, and logs that itself
            log_of.say_change(state)
        if state.state == "done":
            continue
        run, job = state.run, None
        if not state.is_active:
            job = submit_local(study.plan.place, run, folder)
            study = study.with_job(run.name, job.job_id)
            write_study(folder, study)
        follower = LogFollower(folder, run, study.last_jobs[run.name])
        try:
            while True:
                if job is not None:
                    job.done()  # reaps the process
                (now,) = _find_states(study, [run], folder)
                for line in follower.read_new_lines():
                    log.info("    %s", line)
                if not now.is_active:
                    break
                time.sleep(POLL_S["local"])
            log_of.say_change(now)
        except KeyboardInterrupt:
            log.info("stopping %s with a checkpoint ...", run.name)
            cancel_local(study.last_jobs[run.name])
            log.info("continue with: scaling_study.py resume %s", folder)
            raise
    return study


def _submit_missing(study: StudyFile, runs: list[StudyRun], folder: Path) -> StudyFile:
    """Submits one job per size for the runs that are neither done, queued nor running.

    A size that sbatch refuses (too many nodes, say) is logged and does not stop the others.
    """
    states = _find_states(study, runs, folder)
    missing = [s.run for s in states if s.state != "done" and not s.is_active]
    refusals: list[CommandError] = []
    num_submitted = 0
    for _, same_size in groupby(missing, key=lambda run: run.num_gpus):
        group = list(same_size)
        try:
            job_ids = submit_slurm(study.plan.place, group, folder)
        except CommandError as error:
            refusals.append(error)
            continue
        for run, job_id in zip(group, job_ids, strict=True):
            study = study.with_job(run.name, job_id)
        write_study(folder, study)
        num_submitted += len(group)
    if refusals and not num_submitted:
        raise refusals[0]
    for refusal in refusals:
        log.error("%s", refusal)
    return study


def _wait_for_slurm(study: StudyFile, runs: list[StudyRun], folder: Path) -> None:
    """Logs each change of state until nothing is queued or running."""
    log_of = StateLog()
    try:
        while True:
            try:
                states = _find_states(study, runs, folder)
            except PassingError as error:  # SLURM's controller may be down for a while
                log.warning("%s", error)
            else:
                for state in states:
                    log_of.say_change(state)
                if not any(state.is_active for state in states):
                    return
            time.sleep(POLL_S["slurm"])
    except KeyboardInterrupt:
        log.info("the jobs keep running; see: scaling_study.py status %s", folder)
        log.info("stop them with: scaling_study.py cancel %s", folder)
        raise


def _conclude(states: list[RunState], folder: Path) -> int:
    """The table of what is done, the log of what failed, and the exit code."""
    if any(state.state == "done" for state in states):
        runs, notes = load_runs([folder])
        for note in notes:
            log.warning("note: %s", to_writable(note))
        print()
        print("\n".join(to_markdown(scaling_table(study)) for study in build_studies(runs)))
    unfinished = [state for state in states if state.state != "done"]
    for state in unfinished:
        log.error("%s %s: %s", state.run.name, state.state, state.detail)
        for line in log_tail(state, folder):
            log.error("    %s", line)
    if not unfinished:
        return DONE
    log.error("%d of %s not done; run them with: scaling_study.py resume %s",
              len(unfinished), count(len(states), "run"), folder)  # fmt: skip
    failed = [state for state in unfinished if state.state == "failed"]
    return (failed[0].exit_code or CRASH) if failed else TRY_AGAIN


def ask_study(folder: Path) -> tuple[Table, list[str]]:
    """Where each run is, and the ends of the logs of those that failed."""
    study = read_study(folder)
    runs = make_runs(study.plan, folder)
    states = _find_states(study, runs, folder)
    lines = []
    for state in states:
        if state.state == "failed":
            lines += ["", f"{state.run.name} failed; the end of its log:"]
            lines += [f"    {line}" for line in log_tail(state, folder)]
    return state_table(runs, states, f"study {folder}"), lines


def cancel_study(folder: Path) -> int:
    """Ends the jobs of a study; returns how many there were."""
    study = read_study(folder)
    states = _find_states(study, make_runs(study.plan, folder), folder)
    job_ids = [str(state.job_id) for state in states if state.is_active]
    cancel_jobs(study.plan.cluster, job_ids)
    return len(job_ids)


def _find_states(study: StudyFile, runs: Sequence[TrainRun], folder: Path) -> list[RunState]:
    return find_states(study.plan.cluster, runs, study.last_jobs, folder)
