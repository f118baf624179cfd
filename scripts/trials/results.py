"""What the trials of a search came to: their metric, the command of the best, what is kept."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from dataset.errors import UserError
from report.record_shape import is_number
from report.search.trials import Trial, find_best
from scripts.trials.search_file import SearchPlan, full_flags
from train.records.record import read_epochs

ENOUGH_FAILURES = 3  # while nothing has ended well: the fourth would fail too


def read_metric(
    folder: Path, metric: str, how: str = "with --metric, and the same --out"
) -> dict[int, float]:
    """The metric by epoch, from 1 on; raises if epochs were recorded, but never with it."""
    epochs = read_epochs(folder)
    values = {record["epoch"] + 1: _value(record, metric) for record in epochs}
    found = {epoch: value for epoch, value in values.items() if value is not None}
    if epochs and not found and not any(_has(record, metric) for record in epochs):
        known = sorted(name for name, value in epochs[-1].items() if is_number(value))
        raise UserError(
            f"no epoch of {folder.name} has the metric {metric}; choose one of {', '.join(known)} "
            f"(val_ may be left out) {how}"
        )
    return found


def find_end(trial: Trial, metric: str) -> tuple[str, float | None, str]:
    """(state, value, note) of a trial that was trained to its end."""
    if trial.reports:
        return "complete", trial.reports[max(trial.reports)], ""
    return "pruned", None, f"its {metric} is not a number"


def _has(record: Mapping[str, Any], metric: str) -> bool:
    return metric in record or f"val_{metric}" in record


def _value(record: Mapping[str, Any], metric: str) -> float | None:
    """acc1 is short for val_acc1; a loss that overflowed is recorded as null."""
    value = record.get(f"val_{metric}", record.get(metric))
    return float(value) if is_number(value) else None


def describe_params(trial: Trial) -> str:
    """What was chosen, in few characters: `lr 0.0316, recipe sgd`."""
    words = [
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in trial.params.items()
    ]
    return ", ".join(words)


def best_command(plan: SearchPlan, trials: Sequence[Trial], folder: Path) -> str:
    """The command that trains the best trial's model, or an empty string."""
    words = best_words(plan, trials, folder)
    return shlex.join(["python", "-m", "train", *words]) if words else ""


def best_words(
    plan: SearchPlan, trials: Sequence[Trial], folder: Path, epochs: int = 0
) -> list[str]:
    """The trainer's flags for the best trial's model, with EPOCHS for so many; or none."""
    best = find_best(trials, plan.metric)
    if best is None:
        return []
    return [*full_flags(plan, best, folder), *(["--epochs", str(epochs)] if epochs else [])]


def drop_losers(
    plan: SearchPlan, trials: Sequence[Trial], busy: Collection[int], folder: Path
) -> None:
    """Deletes the checkpoints and models of all that is over but the best."""
    best = find_best(trials, plan.metric)
    for trial in trials:
        if not trial.is_over or trial is best or trial.number in busy or plan.keep_checkpoints:
            continue
        shutil.rmtree(folder / trial.name / "ckpt", ignore_errors=True)
        for model in (folder / trial.name).glob("*.pt"):
            model.unlink(missing_ok=True)
