"""Does the streamed order learn as well as the uniform one?

    python benchmarks/convergence.py --save            (about an hour on two cores)
    python benchmarks/convergence.py --save --extend   (only the runs that the record lacks)

A small ResNet at 32 px is trained on three sets in three orders, with paired seeds: uniform,
streamed, and file order with a shuffle buffer as large as the window, which must lose. Each run
that ends is kept in convergence.jsonl: after a kill the same command goes on.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench import FACTS, LOCAL, RESULTS, report
from benchmarks.convergence_picture import draw_picture
from benchmarks.convergence_task import ClassSet, Task, make_sets, train_run
from benchmarks.convergence_verdict import judge, summarise, tables
from benchmarks.run_file import RunFlags, open_runs, train_each, train_missing
from dataset.errors import UserError, run_command
from dataset.flags import flag, make_parser, parse_flags

Run = tuple[str, str, int]  # set, order, seed
# To see in seconds that it runs; it shows nothing about the orders.
QUICK = Task(
    train_per_look=4,
    num_val=100,
    widths=(8,),
    epochs=2,
    batch_size=16,
    seeds=(0, 1),
    more_seeds=(),
)


@dataclass(frozen=True, kw_only=True)
class ConvergenceFlags(RunFlags):
    """The flags of benchmarks/convergence.py."""

    extend: bool = flag(
        False, "keep the runs of the committed record, and train only those that it lacks"
    )


def load_record(path: Path) -> dict[str, Any]:
    """The committed record, to go on from."""
    if not path.exists():
        raise UserError(f"there is no {path} to extend; leave out --extend")
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def list_earlier(record: dict[str, Any], kept: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where the runs that were kept come from, the oldest first: `earlier` of the new record."""
    facts = {name: record[name] for name in FACTS if name != "rounds"}
    num_runs = sum(run["commit"] == record["commit"] for run in kept)
    return [*record.get("earlier", ()), *([facts | {"num_runs": num_runs}] if num_runs else [])]


def train_one(
    task: Task, sets: dict[str, ClassSet], name: str, order: str, seed: int
) -> dict[str, Any]:
    """One run with what names it."""
    return {"set": name, "order": order, "seed": seed, **train_run(task, sets[name], order, seed)}


def train_all(task: Task, num_jobs: int, runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """Each run as it ends."""
    return train_each(train_one, (task, make_sets(task)), runs, num_jobs)


def _key(run: dict[str, Any]) -> Run:
    return run["set"], run["order"], run["seed"]


def main() -> int:
    flags = parse_flags(ConvergenceFlags, make_parser(__doc__))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    task = QUICK if flags.quick else Task()
    name = "convergence_quick" if flags.quick else "convergence"
    # The runs stay out of git: the record has them all when the last one has ended.
    path = (flags.out or LOCAL) / f"{name}.jsonl"
    record = load_record(RESULTS / f"{name}.json") if flags.extend else {"runs": []}
    with open_runs(path, task.digest, flags.fresh, record["runs"]) as file:
        runs = train_missing(file, task.runs, _key, partial(train_all, task, flags.jobs), flags)
    if runs is None:
        return 0
    result = {"rounds": len(task.seeds), "task": asdict(task), "window": task.window, "runs": runs}
    if flags.extend:
        result["earlier"] = list_earlier(record, file.recorded)
    report(name, result, tables, flags)
    draw_picture(result, flags.folder / f"{name}.svg")
    print(summarise(judge(runs)))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
