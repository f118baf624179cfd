"""The tables of a search: its trials, the best first, and how much each flag matters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from report.search.importance import MIN_TRIALS, find_common_epoch
from report.search.trials import Search, Trial, find_best, is_maximised
from report.table import Cell, Column, Table, Value
from report.words import count


def trial_table(
    trials: Sequence[Trial], metric: str, title: str, details: Mapping[int, str] | None = None
) -> Table:
    """The trials, the best first, those without a value last; `details` replace their notes."""
    names = list(dict.fromkeys(name for trial in trials for name in trial.params))
    columns = (
        Column("number", "Trial"),
        Column("state", "State", is_number=False),
        Column("value", metric),
        Column("epochs", "Epochs"),
        *(Column(name, name, is_number=_is_numeric(trials, name)) for name in names),
        Column("detail", "Detail", is_number=False),
    )
    best = find_best(trials, metric)
    sign = -1 if is_maximised(metric) else 1
    order = sorted(trials, key=lambda t: (_rank(t), sign * (t.value or 0.0), t.number))
    rows = tuple(
        (
            Cell(str(t.number), t.number),
            Cell("best" if t is best else t.state, t.state),
            Cell("" if t.value is None else f"{t.value:.4g}", t.value),
            Cell(str(max(t.reports, default=0)), max(t.reports, default=0)),
            *(_param_cell(t.params.get(name)) for name in names),
            _text_cell((details or {}).get(t.number, t.note)),
        )
        for t in order
    )
    return Table("trials", title, columns, rows)


def _is_numeric(trials: Sequence[Trial], name: str) -> bool:
    values = [trial.params[name] for trial in trials if name in trial.params]
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _rank(trial: Trial) -> int:
    """Trained to the end, then stopped on the way, then without a value."""
    if trial.value is None:
        return 2
    return 0 if trial.state == "complete" else 1


def _param_cell(value: Value) -> Cell:
    if value is None:
        return Cell("")
    return Cell(f"{value:.4g}" if isinstance(value, float) else str(value), value)


def _text_cell(text: str) -> Cell:
    return Cell(text, text)


def importance_table(search: Search, importances: Mapping[str, float]) -> Table | None:
    """The importance of each flag, with what it was computed from."""
    if not importances:
        return None
    columns = (
        Column("flag", "Flag", is_number=False),
        Column("importance", "Importance (PED-ANOVA)"),
    )
    rows = tuple(
        (Cell(name, name), Cell(f"{share:.3f}", share)) for name, share in importances.items()
    )
    epoch = find_common_epoch(search)
    num_compared = sum(epoch in t.reports for t in search.trials if t.value is not None)
    notes = (
        f"From the {search.metric} of {count(num_compared, 'trial')} after epoch {epoch}, the last "
        f"that all of them reached (at least {MIN_TRIALS} trials are needed). PED-ANOVA, as Optuna "
        "computes it: how far what the best quarter chose lies from what all chose, flag by flag, "
        "as shares of 1.",
    )
    return Table("importance", f"Importance of each flag, {search.name}", columns, rows, (), notes)
