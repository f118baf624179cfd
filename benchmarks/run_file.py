"""The runs of a benchmark that trains for long: each is kept as it ends, so a kill costs one."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.bench import RecordFlags, find_commit
from dataset.durable import try_lock, write_all
from dataset.errors import UserError
from dataset.flags import flag

log = logging.getLogger("trainyard")
Key = TypeVar("Key", bound=tuple[Any, ...])  # what names a run
Train = Callable[..., dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class RunFlags(RecordFlags):
    """The flags of a benchmark that goes on after a kill."""

    fresh: bool = flag(False, "forget the runs that were trained before")
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
    """The runs that have ended, one line each; they are of one task and one commit.

    `recorded` are runs of a committed record, which may be of another commit: they are not trained
    again, and each keeps the name of its commit.
    """

    def __init__(self, fd: int, task_digest: str, recorded: Sequence[dict[str, Any]] = ()) -> None:
        self._fd = fd
        self._origin = {"task": task_digest, "commit": find_commit()}
        data = os.pread(fd, os.fstat(fd).st_size, 0)
        whole = data[: data.rfind(b"\n") + 1]  # a kill may have torn the last line
        os.ftruncate(fd, len(whole))
        self.runs: list[dict[str, Any]] = [json.loads(line) for line in whole.splitlines()]
        self._of_record = [run for run in recorded if run["task"] == task_digest]

    def check_origin(self, path: Path) -> None:
        """Refuses runs of another task or commit: they could not be compared."""
        for run in self.runs:
            for name, now in self._origin.items():
                if run[name] != now:
                    raise UserError(
                        f"{path} has runs of {name} {run[name]}, and this is {name} {now}; "
                        "finish them there, or start over with --fresh"
                    )

    @property
    def recorded(self) -> list[dict[str, Any]]:
        """The runs of the record; without those of this file, which --save has put there too."""
        return [run for run in self._of_record if run not in self.runs]

    @property
    def all_runs(self) -> list[dict[str, Any]]:
        return self.recorded + self.runs

    def forget(self) -> None:
        os.ftruncate(self._fd, 0)
        self.runs.clear()

    def add(self, run: dict[str, Any]) -> None:
        """Brings one more run to the disk."""
        self.runs.append(run | self._origin)
        write_all(self._fd, json.dumps(self.runs[-1]).encode() + b"\n")
        os.fsync(self._fd)


@contextmanager
def open_runs(
    path: Path, task_digest: str, fresh: bool, recorded: Sequence[dict[str, Any]] = ()
) -> Iterator[RunFile]:
    """The file of the runs, for one process at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        try_lock(fd)
        file = RunFile(fd, task_digest, recorded)
        if fresh:
            file.forget()
        file.check_origin(path)
        yield file
    except BlockingIOError:
        raise UserError(f"another process trains the runs of {path}; wait for it") from None
    finally:
        os.close(fd)


def train_missing(
    file: RunFile,
    wanted: Sequence[Key],
    key_of: Callable[[dict[str, Any]], Key],
    train_all: Callable[[Sequence[Key]], Iterator[dict[str, Any]]],
    flags: RunFlags,
) -> list[dict[str, Any]] | None:
    """All runs in the order of `wanted`, after training those that the file does not have.

    None while some are missing. A run has its "seconds" and its "acc1_pct", one a validation.
    """
    have = set(map(key_of, file.all_runs))
    missing = [key for key in wanted if key not in have][: flags.limit]
    log.info("%d of %d runs on record, %d to train", len(have), len(wanted), len(missing))
    seconds = 0.0
    for done, run in enumerate(train_all(missing) if missing else (), 1):
        file.add(run)
        seconds += run["seconds"]
        left_min = seconds / done * (len(missing) - done) / flags.jobs / 60
        told = ", ".join(map(str, key_of(run)))
        log.info("run %d of %d: %s: %.2f %%; about %.0f min left",
                 done, len(missing), told, run["acc1_pct"][-1], left_min)  # fmt: skip
    if num_missing := len(wanted) - len(file.all_runs):
        log.info("%d runs are missing; the same command goes on", num_missing)
        return None
    return sorted(file.all_runs, key=lambda run: wanted.index(key_of(run)))


_worker: dict[str, Any] = {}


def train_each(
    train: Train, shared: tuple[Any, ...], keys: Sequence[tuple[Any, ...]], num_jobs: int
) -> Iterator[dict[str, Any]]:
    """train(*shared, *key) of each key, as it ends; one job at a time needs no other process."""
    if num_jobs == 1:
        _start_worker(train, shared)
        yield from (_work(key) for key in keys)
        return
    context = torch.multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_jobs, context, _start_process, (train, shared))
    try:
        jobs = [pool.submit(_work, key) for key in keys]
        yield from (job.result() for job in as_completed(jobs))
    finally:
        pool.shutdown(cancel_futures=True)


def _start_process(train: Train, shared: tuple[Any, ...]) -> None:
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _start_worker(train, shared)


def _start_worker(train: Train, shared: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    _worker.update(train=train, shared=shared)


def _work(key: tuple[Any, ...]) -> dict[str, Any]:
    run: dict[str, Any] = _worker["train"](*_worker["shared"], *key)
    return run


def _leave_with_parent() -> None:
    """Ends this process when the one that started it is killed, which would not tell it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
