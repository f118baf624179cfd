"""The pictures of a search: its history, its trials as parallel coordinates, the importances."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from report.plots import GRID, INK, SERIES, Chart, finish_chart, new_figure
from report.search.trials import Search, Trial, find_best, read_range
from report.words import to_label

MAX_AXES = 10  # of parallel coordinates: more names would overlap
BEST_SHARE = 0.2  # of the trials, drawn in colour


def search_charts(search: Search, importances: Mapping[str, float]) -> list[Chart]:
    """All pictures for which there are enough trials."""
    done = [trial for trial in search.trials if trial.value is not None]
    if len(done) < 2:
        return []
    charts = [_history_chart(search, done), _parallel_chart(search, done)]
    return [*charts, _importance_chart(search, importances)] if importances else charts


def _history_chart(search: Search, done: Sequence[Trial]) -> Chart:
    """The value of each trial, and the best so far."""
    figure, axes = new_figure()
    for state, marker, colour in (("complete", "o", SERIES[0]), ("pruned", "x", SERIES[1])):
        points = [(t.number, t.value) for t in done if t.state == state]
        if points:
            label = "trained to the end" if state == "complete" else "stopped early"
            axes.plot(*zip(*points, strict=True), marker, color=colour, label=label, ms=4)
    bests = [find_best(done[: index + 1], search.metric) for index in range(len(done))]
    steps = [(t.number, b.value) for t, b in zip(done, bests, strict=True) if b is not None]
    if steps:
        axes.step(*zip(*steps, strict=True), where="post", color=SERIES[2], label="best so far")
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("trial")
    axes.set_ylabel(to_label(search.metric))
    return finish_chart(figure, axes, "history", f"Search history, {search.name}", columns=3)


def _parallel_chart(search: Search, done: Sequence[Trial]) -> Chart:
    """Each trial as a line across its flags to its value; the best fifth in colour."""
    names = list(dict.fromkeys(name for trial in done for name in trial.params))[:MAX_AXES]
    places = [_make_place(name, done) for name in names]
    values = [trial.value or 0.0 for trial in done]
    low, high = min(values), max(values)
    figure, axes = new_figure()
    order = sorted(done, key=lambda t: t.value or 0.0, reverse=not search.is_maximised)
    first_best = len(order) - max(1, round(BEST_SHARE * len(order)))
    for index, trial in enumerate(order):  # the best last, so above the others
        is_best = index >= first_best
        y = [place(trial) for place in places]
        y.append(((trial.value or 0.0) - low) / (high - low) if high > low else 0.5)
        style = {"color": SERIES[0], "linewidth": 1.6} if is_best else {"color": GRID}
        label = "best fifth" if index == first_best else "others" if index == 0 else None
        axes.plot(range(len(y)), y, label=label, **style)
    axes.set_xticks(range(len(names) + 1), [*map(to_label, names), to_label(search.metric)])
    axes.tick_params(axis="x", labelsize="small", labelrotation=20 if len(names) > 3 else 0)
    axes.set_yticks([])
    _write_ends(axes.annotate, names, done, (low, high))
    axes.set_ylim(-0.12, 1.12)
    return finish_chart(figure, axes, "parallel", f"What each trial chose, {search.name}")


def _make_place(name: str, trials: Sequence[Trial]) -> Callable[[Trial], float]:
    """Where a trial stands on the axis of a flag, from 0 to 1."""
    drawn_from = read_range(trials[0].distributions[name])
    choices = drawn_from.choices
    if choices:
        return lambda trial: choices.index(trial.params[name]) / max(1, len(choices) - 1)
    scale = math.log if drawn_from.is_log else float
    low, high = scale(drawn_from.low), scale(drawn_from.high)
    return lambda trial: (scale(float(trial.params[name])) - low) / (high - low)


def _write_ends(
    annotate: Callable[..., object],
    names: Sequence[str],
    trials: Sequence[Trial],
    values: tuple[float, float],
) -> None:
    """The two ends of each axis, below and above it."""
    ends = [_ends(name, trials) for name in names]
    for x, (low, high) in enumerate([*ends, (f"{values[0]:.4g}", f"{values[1]:.4g}")]):
        for text, y, side in ((low, -0.02, "top"), (high, 1.02, "bottom")):
            annotate(to_label(text), (x, y), ha="center", va=side, fontsize="x-small", color=INK)


def _ends(name: str, trials: Sequence[Trial]) -> tuple[str, str]:
    drawn_from = read_range(trials[0].distributions[name])
    if drawn_from.choices:
        return str(drawn_from.choices[0]), str(drawn_from.choices[-1])
    return f"{drawn_from.low:g}", f"{drawn_from.high:g}"


def _importance_chart(search: Search, importances: Mapping[str, float]) -> Chart:
    figure, axes = new_figure()
    names = list(importances)
    axes.barh(range(len(names)), [importances[name] for name in names], 0.6, color=SERIES[0])
    axes.set_yticks(range(len(names)), [to_label(name) for name in names])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("importance (PED-ANOVA)")
    return finish_chart(figure, axes, "importance", f"Importance of each flag, {search.name}")
