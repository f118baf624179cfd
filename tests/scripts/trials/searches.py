"""Searches for tests: a plan, and whether a search's journal and folders agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from report.search.trials import Trial
from scripts.trials.journal import from_optuna, open_study
from scripts.trials.search_file import SearchPlan
from scripts.trials.space import parse_space
from scripts.trials.store import read_trials
from tests.scripts.trials.stand_in import FLAGS, SPACE


def make_plan(**changes: Any) -> SearchPlan:
    values: dict[str, Any] = {
        "data": "",
        "cluster": "local",
        "trials": 6,
        "jobs": 1,
        "space": SPACE,
        "metric": "acc1",
        "prune": False,
        "seed": 0,
        "gpus": 1,
        "train_flags": FLAGS,
    }
    return SearchPlan(**(values | changes))


def read_journal(folder: Path, plan: SearchPlan) -> list[Trial]:
    """The trials as Optuna's journal has them."""
    study = open_study(folder, plan, 3)
    return [from_optuna(trial) for trial in study.get_trials(deepcopy=False)]


def find_disagreements(folder: Path, plan: SearchPlan, *, goes_on: bool = False) -> list[str]:
    """Where the journal and the folders say different things of a trial.

    goes_on: of a search that is to be resumed. The last trials that the journal has begun to draw
    need no file yet, and what it has heard of a running one may be written at the next look.
    """
    files, journal = read_trials(folder), read_journal(folder, plan)
    if goes_on:
        space = parse_space(plan.space).keys()
        while journal and len(journal) > len(files) and journal[-1].params.keys() < space:
            journal.pop()
    wrong = [] if sorted(files) == list(range(len(journal))) else [f"{sorted(files)}"]
    for theirs in journal:
        ours = files.get(theirs.number)
        names = ["params", "distributions", "state", "value", "reports"]
        for name in names[:4] if goes_on and not theirs.is_over else names:
            if ours and getattr(ours, name) != getattr(theirs, name):
                wrong.append(f"{theirs.name}: {name}")
    return wrong
