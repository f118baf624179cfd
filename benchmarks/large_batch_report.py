"""The table and the picture of benchmarks/large_batch.py, computed from its CSV."""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
SMALL = "small batch"
WAYS = {  # and their colours
    "reference, LR left": "#d95f02",
    "reference, LR scaled": "#e6ab02",
    "ours (auto: lars)": "#1b9e77",
    "ours (sgd)": "#7570b3",
}


def read_rows(path: Path) -> Rows:
    """The rows of the CSV; a missing file has none."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: Rows) -> None:
    """Writes all rows, whole or not at all."""
    part = path.with_name(path.name + ".part")
    with open(part, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    part.replace(path)


def final_accuracies(rows: Rows) -> dict[str, list[float]]:
    """The last accuracy of each seed, by plan, in the order of the file's first seed."""
    last: dict[tuple[str, str], float] = {}
    for row in rows:
        last[row["plan"], str(row["seed"])] = float(row["acc1_pct"])
    by_plan: dict[str, list[float]] = defaultdict(list)
    for (plan, _), acc1_pct in last.items():
        by_plan[plan].append(acc1_pct)
    return dict(sorted(by_plan.items(), key=lambda item: _order(item[0])))


def _order(plan: str) -> tuple[int, int]:
    """The small batch, then by size; in a size the reference's ways before ours."""
    if plan == SMALL:
        return (0, 0)
    way, _, times = plan.rpartition(", ")
    return (int(times.rstrip("x")), list(WAYS).index(way))


def won_back(accuracies: dict[str, list[float]], ours: str, theirs: str) -> str:
    """The share of the loss of the reference's way that ours does not have."""
    small, lost, mine = (statistics.fmean(accuracies[plan]) for plan in (SMALL, theirs, ours))
    return f"{100 * (mine - lost) / (small - lost):.0f} %" if small > lost else "nothing was lost"


def make_table(rows: Rows) -> str:
    """The markdown table: mean, spread over the seeds, and what ours wins back of each loss."""
    accuracies = final_accuracies(rows)
    first = {row["plan"]: row for row in rows}
    lines = [
        "| way | batch | LR | warm-up epochs | steps | seeds | top-1 % (lowest to highest) | lost "
        "| won back, LR left | won back, LR scaled |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for plan, values in accuracies.items():
        row, mean = first[plan], statistics.fmean(values)
        cells = [plan, *(row[name] for name in ("batch_size", "lr", "warmup_epochs", "step"))]
        cells += [str(len(values)), f"{mean:.1f} ({min(values):.1f} to {max(values):.1f})"]
        is_compared = plan != SMALL and SMALL in accuracies
        cells.append(f"{statistics.fmean(accuracies[SMALL]) - mean:.1f}" if is_compared else "")
        for way in list(WAYS)[:2]:
            theirs = f"{way}, {plan.rpartition(', ')[2]}"
            is_ours = is_compared and plan.startswith("ours") and theirs in accuracies
            cells.append(won_back(accuracies, plan, theirs) if is_ours else "")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def draw_curves(rows: Rows, passes: int, path: Path) -> None:
    """Accuracy against passes over the data: a panel for 16x and one for 64x, mean and spread."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for axis, times in zip(axes, ("16x", "64x"), strict=True):
        for plan in final_accuracies(rows):
            if plan != SMALL and not plan.endswith(times):
                continue
            way = SMALL if plan == SMALL else plan.rpartition(", ")[0]
            xs, low, mean, high = _curve(rows, plan)
            colour, dashes = WAYS.get(way, "0.35"), (4, 2) if plan == SMALL else ()
            axis.plot(xs, mean, color=colour, label=way, dashes=dashes)
            axis.fill_between(xs, low, high, color=colour, alpha=0.2, linewidth=0)
        axis.set(title=f"{times} the batch", xlabel="passes over the data", xlim=(0, passes))
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right")
    axes[0].set_ylabel("validation top-1, %")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _curve(rows: Rows, plan: str) -> tuple[list[int], list[float], list[float], list[float]]:
    """Passes, and the lowest, mean and highest accuracy of the seeds at each."""
    points: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        if row["plan"] == plan:
            points[int(row["pass"])].append(float(row["acc1_pct"]))
    xs = sorted(points)
    low, high = [min(points[x]) for x in xs], [max(points[x]) for x in xs]
    return xs, low, [statistics.fmean(points[x]) for x in xs], high
