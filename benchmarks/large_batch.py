"""Does accuracy survive the large batch? The small batch's recipe scaled up, against ours.

    python benchmarks/large_batch.py --fresh  (more than half an hour on two cores)

Runs on record are not trained again; large_batch.json names the commit of each that is trained.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.bench import RESULTS, RecordFlags, find_commit, write_result
from benchmarks.large_batch_report import Rows, draw_curves, make_table, read_rows, write_rows
from benchmarks.large_batch_task import (
    Data,
    Task,
    TrainingPlan,
    draw_images,
    fingerprint,
    make_plans,
    train_run,
)
from dataset.errors import UserError, run_command
from dataset.flags import flag, make_parser, parse_flags

log = logging.getLogger("trainyard")
SEEDS = (0, 1, 2)


_worker: dict[str, Any] = {}


def _start_worker(task: Task, data: Data) -> None:
    torch.set_num_threads(1)
    _worker.update(task=task, data=data)


def _work(plan: TrainingPlan, seed: int) -> Rows:
    """The rows of one run, in a process of its own with one thread."""
    task, start_s = _worker["task"], time.monotonic()
    return [
        {
            "task": fingerprint(task, plan),
            "plan": plan.name,
            "seed": seed,
            "batch_size": task.small_batch * plan.times,
            "lr": f"{plan.recipe.lr:.4g}",
            "warmup_epochs": f"{plan.recipe.warmup_epochs:.4g}",
            **row,
            "seconds": round(time.monotonic() - start_s, 1),
        }
        for row in train_run(task, plan, seed, _worker["data"])
    ]


def run_all(
    task: Task, data: Data, runs: Sequence[tuple[TrainingPlan, int]], num_jobs: int
) -> Iterator[Rows]:
    """The rows of each run as it ends; one job at a time needs no other process."""
    if num_jobs == 1:
        _start_worker(task, data)
        yield from (_work(plan, seed) for plan, seed in runs)
        return
    context = torch.multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_jobs, context, _start_worker, (task, data)) as pool:
        jobs = [pool.submit(_work, plan, seed) for plan, seed in runs]
        yield from (job.result() for job in as_completed(jobs))


def train_missing(
    task: Task, known: Rows, path: Path, limit: int | None, num_jobs: int
) -> Iterator[str]:
    """Trains the runs that are not known, at most `limit`; the name of each when it is written."""
    plans = make_plans(task)
    kept = [r for r in known if r["plan"] in plans]
    kept = [r for r in kept if r["task"] == fingerprint(task, plans[r["plan"]])]
    have = {(r["plan"], int(r["seed"])) for r in kept}
    missing = [(p, s) for s in SEEDS for p in plans.values() if (p.name, s) not in have]
    missing.sort(key=lambda run: run[0].times > 16)  # first what a figure is asked of
    log.info("%d runs on record, %d to train", len(have), len(missing))
    if not missing[:limit]:
        return
    train, val = task.train_per_class, task.val_per_class
    data = Data(*draw_images(task, 0, train), *draw_images(task, 1, val))
    for rows in run_all(task, data, missing[:limit], num_jobs):
        kept += rows
        write_rows(path, kept)
        name = f"{rows[-1]['plan']}, seed {rows[-1]['seed']}"
        log.info("%s: %s %%", name, rows[-1]["acc1_pct"])
        yield name


@dataclass(frozen=True, kw_only=True)
class LargeBatchFlags(RecordFlags):
    """The flags of benchmarks/large_batch.py."""

    fresh: bool = flag(False, "forget the runs on record")
    limit: int | None = flag(None, "train at most so many runs now")
    jobs: int = flag(2, "runs at a time, a core each")

    def __post_init__(self) -> None:
        if self.jobs < 1 or (self.limit is not None and self.limit < 0):
            raise UserError(
                f"--jobs {self.jobs} --limit {self.limit}: give 1 or more jobs, no minus"
            )


def main() -> int:
    flags = parse_flags(LargeBatchFlags, make_parser(__doc__))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    folder, task = flags.folder, Task()
    folder.mkdir(parents=True, exist_ok=True)
    path, facts = folder / "large_batch.csv", folder / "large_batch.json"
    known = [] if flags.fresh else read_rows(path)
    if not known and not flags.fresh and (known := read_rows(RESULTS / path.name)):
        log.info("runs of the committed record are shown, not measured; --fresh trains all (hours)")
    commits = json.loads(facts.read_text())["commits"] if known and facts.exists() else {}
    for name in train_missing(task, known, path, flags.limit, flags.jobs):
        commits[name] = find_commit()
        write_result("large_batch", {"rounds": len(SEEDS), "commits": commits}, flags)
    if rows := read_rows(path) or known:
        print(make_table(rows))
        draw_curves(rows, task.passes, folder / "large_batch.png")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
