"""One microbatch for all rows of a study: the smallest that a row found to fit on its GPUs."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from dataset.errors import CommandError
from scripts.study.plan import make_runs
from scripts.study.study_file import StudyFile, write_study
from train.records.record import RUN_FILE, read_run

log = logging.getLogger("trainyard")


def find_microbatches(study: StudyFile, folder: Path) -> dict[str, int]:
    """The microbatch of each recorded row, by name; empty if all rows have the same."""
    runs = make_runs(study.plan, folder)
    found = {}
    for run in runs:
        try:
            microbatch = read_run(folder / run.name)["config"]["microbatch"]
        except (OSError, KeyError, TypeError, CommandError):
            continue
        if type(microbatch) is int and microbatch > 0:
            found[run.name] = microbatch
    return found if len(set(found.values())) > 1 else {}


def share_microbatch(study: StudyFile, folder: Path) -> StudyFile:
    """The study with the smallest microbatch of its rows for all; rows with another run again.

    Otherwise batch norm would use groups of different sizes, and rows could not be compared.
    """
    found = find_microbatches(study, folder)
    if not found:
        return study
    least = min(found.values())
    for name, microbatch in found.items():
        if microbatch > least:
            _set_aside(folder / name, microbatch)
            log.info("%s runs again with microbatches of %d, as all other rows", name, least)
    shared = replace(study, plan=replace(study.plan, microbatch=least))
    write_study(folder, shared)
    return shared


def _set_aside(run: Path, microbatch: int) -> None:
    """Renames the run and its record, so that no table counts it as a row."""
    (run / RUN_FILE).rename(run / f"superseded-{RUN_FILE}")
    aside = run.with_name(f"{run.name}-microbatch{microbatch}")
    number = 1
    while aside.exists():
        number += 1
        aside = run.with_name(f"{run.name}-microbatch{microbatch}-{number}")
    run.rename(aside)
