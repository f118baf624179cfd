"""The picture of benchmarks/search.py: the table of trainings, and how the searchers come on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.picture import svg_style, tidy
from benchmarks.search_verdict import NUM_SAME, RANDOM, TPE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's, told apart by colour-blind readers too.
COLOURS = {TPE: "#D55E00", RANDOM: "#0072B2"}
FIRST_SHOWN = 5  # trials: before, the curves fall from so high that the rest would be flat


def draw_picture(result: dict[str, Any], path: Path) -> None:
    """Writes the SVG: its own white ground, so that it can be read on a dark page too."""
    from matplotlib.figure import Figure

    recipes = result["task"]["recipes"]
    with svg_style("search"):
        figure = Figure(figsize=(9.0, 3.6), layout="constrained", facecolor="white")
        grid = figure.add_gridspec(len(recipes), 2, width_ratios=(5, 4))
        for row, recipe in enumerate(recipes):
            _draw_table(figure.add_subplot(grid[row, 0]), result, recipe)
        figure.axes[0].set_title("validation top-1 (%) of each training")
        figure.axes[-1].set_xlabel("lr")
        _draw_searches(figure.add_subplot(grid[:, 1]), result)
        figure.savefig(path, metadata={"Date": None})


def _draw_table(axes: Axes, result: dict[str, Any], recipe: str) -> None:
    """The accuracies of a recipe as a map of lr and momentum."""
    momenta, lrs = result["task"]["momenta"], result["task"]["lrs"]
    own = [run for run in result["runs"] if run["recipe"] == recipe]
    found = {(run["momentum"], run["lr"]): run["acc1_pct"][-1] for run in own}
    values = np.array([[found[momentum, lr] for lr in lrs] for momentum in momenta])
    high = max(run["acc1_pct"][-1] for run in result["runs"])
    axes.imshow(values, cmap="cividis", vmin=0, vmax=high, aspect="auto", origin="lower")
    for (row, column), value in np.ndenumerate(values):
        ink = "black" if value > 0.55 * high else "white"
        weight = "bold" if value == high else "normal"
        axes.text(column, row, f"{value:.0f}", ha="center", va="center", color=ink, weight=weight)
    axes.set_xticks(range(len(lrs)), [f"{lr:g}" for lr in lrs])
    axes.set_yticks(range(len(momenta)), [f"{momentum:g}" for momentum in momenta])
    axes.set_ylabel(f"{recipe}: momentum")


def _draw_searches(axes: Axes, result: dict[str, Any]) -> None:
    """The best so far by trial: the median of the seeds in its quartiles."""
    best = max(run["acc1_pct"][-1] for run in result["runs"])
    for name, colour in COLOURS.items():
        below = best - np.array(result["best_so_far_pct"][name])[:, FIRST_SHOWN - 1 :]
        trials = range(FIRST_SHOWN, FIRST_SHOWN + below.shape[1])
        low, middle, high = np.quantile(below, (0.25, 0.5, 0.75), axis=0)
        axes.fill_between(trials, low, high, color=colour, alpha=0.2, linewidth=0, step="post")
        style = "--" if name == RANDOM else "-"  # they are one line at first
        axes.step(trials, middle, style, where="post", color=colour, linewidth=1.8, label=name)
    axes.axvline(NUM_SAME, color="#666666", linewidth=0.8, linestyle=":")
    axes.set(xlabel="trials", ylabel="points below the table's best")
    axes.set_ylim(bottom=-0.2)
    axes.set_title(f"median and quartiles of {result['rounds']} seeds")
    axes.legend(frameon=False)
    tidy(axes)
