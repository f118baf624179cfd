"""Does the search find good flags sooner than random search?

    python benchmarks/search.py --save  (a few minutes on two cores)

A narrow ResNet at 32 px is trained once with each of 72 settings of three flags: the table. Then
both searchers look for its best setting, 50 seeds each; a trial is answered from the table. Each
training that ends is kept in search.jsonl: after a kill the same command goes on.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import optuna

from benchmarks.bench import LOCAL, report
from benchmarks.large_batch_task import Task as NetTask
from benchmarks.run_file import RunFlags, open_runs, train_each, train_missing
from benchmarks.search_picture import draw_picture
from benchmarks.search_replay import replay_all
from benchmarks.search_task import Cell, SearchTask, draw_data, train_cell
from benchmarks.search_verdict import judge, summarise, tables
from dataset.errors import run_command
from dataset.flags import make_parser, parse_flags

# To see in seconds that it runs; it shows nothing about the searchers.
QUICK = SearchTask(
    momenta=(0.0, 0.9),
    lrs=(0.1, 1.0, 10.0),
    num_trials=12,
    num_seeds=3,
    net=NetTask(
        num_classes=4,
        train_per_class=8,
        val_per_class=8,
        widths=(8,),
        passes=1,
        epochs=1,
        small_batch=8,
        eval_passes=1,
    ),
)


def train_all(task: SearchTask, num_jobs: int, cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """Each training as it ends."""
    return train_each(train_cell, (task, draw_data(task)), cells, num_jobs)


def _key(run: dict[str, Any]) -> Cell:
    return run["recipe"], run["momentum"], run["lr"]


def main() -> int:
    flags = parse_flags(RunFlags, make_parser(__doc__))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    task = QUICK if flags.quick else SearchTask()
    name = "search_quick" if flags.quick else "search"
    # The runs stay out of git: the record has them all when the last one has ended.
    path = (flags.out or LOCAL) / f"{name}.jsonl"
    with open_runs(path, task.digest, flags.fresh) as file:
        runs = train_missing(file, task.cells, _key, partial(train_all, task, flags.jobs), flags)
    if runs is None:
        return 0
    accuracies = {_key(run): run["acc1_pct"][-1] for run in runs}
    result = {
        "rounds": task.num_seeds,
        "task": asdict(task),
        "optuna": optuna.__version__,
        "runs": runs,
        "best_so_far_pct": replay_all(task, accuracies),
    }
    report(name, result, tables, flags)
    draw_picture(result, flags.folder / f"{name}.svg")
    print(summarise(judge(result)))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
