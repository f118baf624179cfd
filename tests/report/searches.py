"""Folders of searches as scripts/search.py writes them, for the tests of the reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dataset.durable import write_json
from report.search.trials import SCHEMA, SEARCH_FILE, TRIAL_FILE, name_trial


def _distribution(kind: str, **attributes: Any) -> str:
    return json.dumps({"name": kind, "attributes": attributes})


DISTRIBUTIONS = {
    "lr": _distribution("FloatDistribution", step=None, low=0.01, high=10.0, log=True),
    "wd": _distribution("FloatDistribution", step=None, low=0.0, high=0.001, log=False),
    "recipe": _distribution("CategoricalDistribution", choices=["sgd", "lars"]),
}


def trial_record(number: int, **changes: Any) -> dict[str, Any]:
    """A trial.json; the rates of ten trials lie evenly in the range, the fifth is the best."""
    lr = 0.011 * 2**number
    value = 90.0 - 3 * (number - 5) ** 2
    state = "pruned" if number in (1, 8) else "complete"
    reports = {"1": value / 2} if state == "pruned" else {"1": value / 2, "2": value}
    record = {
        "schema": SCHEMA,
        "number": number,
        "params": {"lr": lr, "wd": 1e-4 * (number * 7 % 10), "recipe": ("sgd", "lars")[number % 2]},
        "distributions": DISTRIBUTIONS,
        "state": state,
        "value": list(reports.values())[-1],
        "reports": reports,
        "attrs": {},
        "jobs": [str(100 + number)],
        "began_s": 1000.0 + 60 * number,
        "ended_s": 1050.0 + 60 * number,
        "note": "was behind the others" if state == "pruned" else "",
    }
    return record | changes


def write_search(folder: Path, num_trials: int = 10, metric: str = "acc1") -> Path:
    """The folder of a search with so many trials."""
    folder.mkdir(parents=True)
    write_json(folder / SEARCH_FILE, {"schema": SCHEMA, "plan": {"metric": metric}})
    for number in range(num_trials):
        trial = folder / name_trial(number)
        trial.mkdir()
        write_json(trial / TRIAL_FILE, trial_record(number))
    return folder
