"""Does the streamed order learn as well as the uniform one?

    python benchmarks/convergence.py --save  (about an hour on two cores)

A small ResNet at 32 px is trained on three sets in three orders, with paired seeds: uniform,
streamed, and file order with a shuffle buffer as large as the window, which must lose. Each run
that ends is kept in convergence.jsonl: after a kill the same command goes on.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.bench import LOCAL, RecordFlags, find_commit, report
from benchmarks.convergence_picture import draw_picture
from benchmarks.convergence_task import ClassSet, Task, make_sets, train_run
from benchmarks.convergence_verdict import judge, summarise, tables
from dataset.durable import try_lock, write_all
from dataset.errors import UserError, run_command
from dataset.flags import flag, make_parser, parse_flags

log = logging.getLogger("trainyard")
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
class ConvergenceFlags(RecordFlags):
    """The flags of benchmarks/convergence.py."""

    fresh: bool = flag(False, "forget the runs of convergence.jsonl")
    quick: bool = flag(False, "a tiny task in seconds, to see that it runs; it shows nothing")
    limit: int | None = flag(None, "train at most so many runs now")
    jobs: int = flag(2, "runs at a time, a core each; default 2")

    def __post_init__(self) -> None:
        if self.jobs < 1 or (self.limit is not None and self.limit < 0):
            raise UserError(
                f"--jobs {self.jobs} --limit {self.limit}: give 1 or more jobs, no minus"
            )
        if self.quick and self.save:
            raise UserError("--quick shows nothing that could be saved; leave out one of them")


class RunFile:
    """The runs that have ended, one line each; they are of one task and one commit."""

    def __init__(self, fd: int, task: Task) -> None:
        self._fd = fd
        self._origin = {"task": task.digest, "commit": find_commit()}
        data = os.pread(fd, os.fstat(fd).st_size, 0)
        whole = data[: data.rfind(b"\n") + 1]  # a kill may have torn the last line
        os.ftruncate(fd, len(whole))
        self.runs: list[dict[str, Any]] = [json.loads(line) for line in whole.splitlines()]

    def check_origin(self, path: Path) -> None:
        """Refuses runs of another task or commit: they could not be compared."""
        for run in self.runs:
            for name, now in self._origin.items():
                if run[name] != now:
                    raise UserError(
                        f"{path} has runs of {name} {run[name]}, and this is {name} {now}; "
                        "finish them there, or start over with --fresh"
                    )

    def forget(self) -> None:
        os.ftruncate(self._fd, 0)
        self.runs.clear()

    def add(self, run: dict[str, Any]) -> None:
        """Brings one more run to the disk."""
        self.runs.append(run | self._origin)
        write_all(self._fd, json.dumps(self.runs[-1]).encode() + b"\n")
        os.fsync(self._fd)


@contextmanager
def open_runs(path: Path, task: Task, fresh: bool) -> Iterator[RunFile]:
    """The file of the runs, for one process at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        try_lock(fd)
        file = RunFile(fd, task)
        if fresh:
            file.forget()
        file.check_origin(path)
        yield file
    except BlockingIOError:
        raise UserError(f"another process trains the runs of {path}; wait for it") from None
    finally:
        os.close(fd)


_worker: dict[str, Any] = {}


def _start_worker(task: Task, sets: dict[str, ClassSet]) -> None:
    torch.set_num_threads(1)
    _worker.update(task=task, sets=sets)


def _start_process(task: Task, sets: dict[str, ClassSet]) -> None:
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _start_worker(task, sets)


def _leave_with_parent() -> None:
    """Ends this process when the one that started it is killed, which would not tell it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(name: str, order: str, seed: int) -> dict[str, Any]:
    found = train_run(_worker["task"], _worker["sets"][name], order, seed)
    return {"set": name, "order": order, "seed": seed, **found}


def train_all(task: Task, runs: Sequence[Run], num_jobs: int) -> Iterator[dict[str, Any]]:
    """Each run as it ends; one job at a time needs no other process."""
    sets = make_sets(task)
    if num_jobs == 1:
        _start_worker(task, sets)
        yield from (_work(*run) for run in runs)
        return
    context = torch.multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_jobs, context, _start_process, (task, sets))
    try:
        jobs = [pool.submit(_work, *run) for run in runs]
        yield from (job.result() for job in as_completed(jobs))
    finally:
        pool.shutdown(cancel_futures=True)


def _key(run: dict[str, Any]) -> Run:
    return run["set"], run["order"], run["seed"]


def train_missing(task: Task, file: RunFile, flags: ConvergenceFlags) -> None:
    """Trains the runs that the file does not have, and says how far it is."""
    have = set(map(_key, file.runs))
    missing = [run for run in task.runs if run not in have][: flags.limit]
    log.info("%d of %d runs on record, %d to train", len(have), len(task.runs), len(missing))
    if not missing:
        return
    seconds = 0.0
    for done, run in enumerate(train_all(task, missing, flags.jobs), 1):
        file.add(run)
        seconds += run["seconds"]
        left_min = seconds / done * (len(missing) - done) / flags.jobs / 60
        told = f"{run['set']}, {run['order']}, seed {run['seed']}: {run['acc1_pct'][-1]:.2f} %"
        log.info("run %d of %d: %s; about %.0f min left", done, len(missing), told, left_min)


def main() -> int:
    flags = parse_flags(ConvergenceFlags, make_parser(__doc__))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    task = QUICK if flags.quick else Task()
    name = "convergence_quick" if flags.quick else "convergence"
    # The runs stay out of git: the record has them all when the last one has ended.
    path = (flags.out or LOCAL) / f"{name}.jsonl"
    with open_runs(path, task, flags.fresh) as file:
        train_missing(task, file, flags)
        runs = sorted(file.runs, key=lambda run: task.runs.index(_key(run)))
    if len(runs) < len(task.runs):
        log.info("%d runs are missing; the same command goes on", len(task.runs) - len(runs))
        return 0
    result = {"rounds": len(task.seeds), "task": asdict(task), "window": task.window, "runs": runs}
    report(name, result, tables, flags)
    draw_picture(result, flags.folder / f"{name}.svg")
    print(summarise(judge(runs)))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
