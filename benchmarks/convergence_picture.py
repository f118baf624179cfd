"""The picture of benchmarks/convergence.py: accuracy by epoch, and the differences."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.convergence_verdict import (
    CONTROL,
    MARGIN,
    STREAMED,
    UNIFORM,
    Runs,
    Verdict,
    judge,
    list_sets,
)
from benchmarks.picture import svg_style, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's, told apart by colour-blind readers too.
COLOURS = {UNIFORM: "#0072B2", STREAMED: "#D55E00", CONTROL: "#666666"}


def draw_picture(result: dict[str, Any], path: Path) -> None:
    """Writes the SVG: its own white ground, so that it can be read on a dark page too."""
    from matplotlib.figure import Figure

    runs = result["runs"]
    sets, verdicts = list_sets(runs), judge(runs)
    with svg_style("convergence"):
        figure = Figure(figsize=(9.0, 5.6), layout="constrained", facecolor="white")
        grid = figure.add_gridspec(2, len(sets), height_ratios=(3, 2))
        for column, name in enumerate(sets):
            _draw_curves(figure.add_subplot(grid[0, column]), name, runs)
        _draw_differences(figure.add_subplot(grid[1, :]), verdicts)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
        figure.axes[0].set_ylabel("validation top-1 (%)")
        figure.savefig(path, metadata={"Date": None})


def _draw_curves(axes: Axes, name: str, runs: Runs) -> None:
    """A thin line a seed, and a thick one for their mean."""
    for order, colour in COLOURS.items():
        own = [run["acc1_pct"] for run in runs if (run["set"], run["order"]) == (name, order)]
        epochs = range(1, len(own[0]) + 1)
        for curve in own:
            axes.plot(epochs, curve, color=colour, linewidth=0.6, alpha=0.5)
        mean = [statistics.fmean(values) for values in zip(*own, strict=True)]
        style = "--" if order == STREAMED else "-"  # it would hide the uniform line
        axes.plot(epochs, mean, style, color=colour, linewidth=1.8, label=order)
    axes.set(title=name, xlabel="epoch", ylim=(0, 100))
    axes.locator_params(axis="x", integer=True)
    tidy(axes)


def _draw_differences(axes: Axes, verdicts: Sequence[Verdict]) -> None:
    """The 90 % interval of streamed - uniform of each set, its pairs, and the margin."""
    reach = max(
        2 * MARGIN,
        *(1.1 * abs(value) for v in verdicts for value in (v.streamed.low, v.streamed.high)),
    )
    axes.axvspan(-MARGIN, MARGIN, color="#009E73", alpha=0.15, linewidth=0)
    axes.axvline(0, color="#666666", linewidth=0.8)
    for row, verdict in enumerate(verdicts):
        found = verdict.streamed
        axes.plot(found.pairs, [row] * len(found.pairs), "|", color=COLOURS[STREAMED], ms=7)
        error = [[found.mean - found.low], [found.high - found.mean]]
        axes.errorbar([found.mean], [row], xerr=error, fmt="o", color=COLOURS[STREAMED], capsize=4)
        text = f"{CONTROL}: {verdict.control.mean:+.1f}"
        axes.text(0.99 * reach, row - 0.18, text, color=COLOURS[CONTROL], ha="right")
    axes.set_yticks(range(len(verdicts)), [v.name.replace(", ", "\n") for v in verdicts])
    axes.set(xlim=(-reach, reach), ylim=(len(verdicts) - 0.5, -0.6))
    axes.set_xlabel(
        f"streamed - uniform, points: each pair of seeds, the mean and its 90 % interval; "
        f"shaded: the margin of {MARGIN:g}"
    )
    tidy(axes)
