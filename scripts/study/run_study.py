"""A study from its first submission to its table: run, wait, conclude, ask, cancel."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

from dataset.durable import lock_file
from dataset.errors import CRASH, DONE, TRY_AGAIN, PassingError, UserError
from report.runs import load_runs
from report.scaling import build_studies
from report.scaling_tables import scaling_table
from report.table import Table, to_markdown, to_writable
from report.words import count
from scripts.study.jobs import cancel_local, cancel_slurm, submit_local, submit_slurm
from scripts.study.microbatch import find_microbatches, share_microbatch
from scripts.study.plan import (
    Point,
    StudyFile,
    describe_pin,
    make_points,
    read_study,
    write_study,
)
from scripts.study.state import LogFollower, PointState, find_states, log_tail, state_table

log = logging.getLogger("trainyard")
POLL_S = {"local": 0.5, "slurm": 5.0}


def run_study(study: StudyFile, folder: Path, wait: bool) -> int:
    """Submits what is missing, waits for it, and prints the table."""
    with _only_one(folder):
        write_study(folder, study)
        while True:
            study = share_microbatch(study, folder)
            states = _run_points(study, folder, wait)
            if states is None:
                return DONE
            study = read_study(folder)
            if not find_microbatches(study, folder):
                break
    return _conclude(states, folder)


def _run_points(study: StudyFile, folder: Path, wait: bool) -> list[PointState] | None:
    """The states of the points once all that were missing have ended; None: not waited for."""
    points = make_points(study.plan, folder)
    log.info("study %s: %s", folder, count(len(points), "run"))
    if pin := describe_pin(study.plan, folder):
        log.info("%s", pin)
    if study.plan.cluster == "local":
        study = _run_local(study, points, folder)
    else:
        study = _submit_missing(study, points, folder)
        if not wait:
            log.info("submitted; see how far it is with: scaling_study.py status %s", folder)
            return None
        _wait_for_slurm(study, points, folder)
    return find_states(study, points, folder)


def _run_local(study: StudyFile, points: list[Point], folder: Path) -> StudyFile:
    """Runs the points one after another, since they share the machine."""
    before: dict[str, str] = {}
    for state in find_states(study, points, folder):
        if state.state != "missing":  # it is about to start, and logs that itself
            _say_change(before, state)
        if state.state == "done":
            continue
        point, job = state.point, None
        if not state.is_active:
            job = submit_local(study.plan, point, folder)
            study = study.with_job(point.name, job.job_id)
            write_study(folder, study)
        follower = LogFollower(folder, point, str(study.last_job(point.name)))
        try:
            while True:
                if job is not None:
                    job.done()  # reaps the process
                (now,) = find_states(study, [point], folder)
                for line in follower.new_lines():
                    log.info("    %s", line)
                if not now.is_active:
                    break
                time.sleep(POLL_S["local"])
            _say_change(before, now)
        except KeyboardInterrupt:
            log.info("stopping %s with a checkpoint ...", point.name)
            cancel_local(str(study.last_job(point.name)))
            log.info("continue with: scaling_study.py resume %s", folder)
            raise
    return study


def _submit_missing(study: StudyFile, points: list[Point], folder: Path) -> StudyFile:
    """Submits one job per size for the points that are neither done, queued nor running.

    A size that sbatch refuses (too many nodes, say) is logged and does not stop the others.
    """
    states = find_states(study, points, folder)
    missing = [s.point for s in states if s.state != "done" and not s.is_active]
    refusals: list[UserError] = []
    num_submitted = 0
    for _, same_size in groupby(missing, key=lambda point: point.num_gpus):
        group = list(same_size)
        try:
            job_ids = submit_slurm(study.plan, group, folder)
        except UserError as error:
            refusals.append(error)
            continue
        for point, job_id in zip(group, job_ids, strict=True):
            study = study.with_job(point.name, job_id)
        write_study(folder, study)
        num_submitted += len(group)
    if refusals and not num_submitted:
        raise refusals[0]
    for refusal in refusals:
        log.error("%s", refusal)
    return study


def _wait_for_slurm(study: StudyFile, points: list[Point], folder: Path) -> None:
    """Logs each change of state until nothing is queued or running."""
    before: dict[str, str] = {}
    try:
        while True:
            try:
                states = find_states(study, points, folder)
            except PassingError as error:  # SLURM's controller may be down for a while
                log.warning("%s", error)
            else:
                for state in states:
                    _say_change(before, state)
                if not any(state.is_active for state in states):
                    return
            time.sleep(POLL_S["slurm"])
    except KeyboardInterrupt:
        log.info("the jobs keep running; see: scaling_study.py status %s", folder)
        log.info("stop them with: scaling_study.py cancel %s", folder)
        raise


def _conclude(states: list[PointState], folder: Path) -> int:
    """The table of what is done, the log of what failed, and the exit code."""
    if any(state.state == "done" for state in states):
        runs, notes = load_runs([folder])
        for note in notes:
            log.warning("note: %s", to_writable(note))
        print()
        print("\n".join(to_markdown(scaling_table(study)) for study in build_studies(runs)))
    unfinished = [state for state in states if state.state != "done"]
    for state in unfinished:
        log.error("%s %s: %s", state.point.name, state.state, state.detail)
        for line in log_tail(state, folder):
            log.error("    %s", line)
    if not unfinished:
        return DONE
    log.error("%d of %s not done; run them with: scaling_study.py resume %s",
              len(unfinished), count(len(states), "run"), folder)  # fmt: skip
    failed = [state for state in unfinished if state.state == "failed"]
    return (failed[0].exit_code or CRASH) if failed else TRY_AGAIN


def ask_study(folder: Path) -> tuple[Table, list[str]]:
    """Where each point is, and the ends of the logs of those that failed."""
    study = read_study(folder)
    states = find_states(study, make_points(study.plan, folder), folder)
    lines = []
    for state in states:
        if state.state == "failed":
            lines += ["", f"{state.point.name} failed; the end of its log:"]
            lines += [f"    {line}" for line in log_tail(state, folder)]
    return state_table(states, f"study {folder}"), lines


def cancel_study(folder: Path) -> int:
    """Ends the jobs of a study; returns how many there were."""
    study = read_study(folder)
    states = find_states(study, make_points(study.plan, folder), folder)
    job_ids = [str(state.job_id) for state in states if state.is_active]
    if study.plan.cluster == "slurm":
        cancel_slurm(job_ids)
    else:
        for job_id in job_ids:
            cancel_local(job_id)
    return len(job_ids)


def _say_change(before: dict[str, str], state: PointState) -> None:
    now = json.dumps([state.state, state.detail])
    if before.get(state.point.name) != now:
        before[state.point.name] = now
        detail = f": {state.detail}" if state.detail else ""
        log.info("%s  %s%s", state.point.name, state.state, detail)


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Holds the study's lock: two starts of one study would submit its points twice."""
    try:
        lock, _ = lock_file(folder / ".lock")
    except BlockingIOError:
        raise PassingError(
            f"{folder} is being run by another process; ask for its status"
        ) from None
    try:
        yield
    finally:
        os.close(lock)
