"""What does an epoch cost beside its steps? Ours against pytorch/examples' loop, on real images.

    python benchmarks/epoch_overhead.py --rounds 3

The fixed cost of an epoch is its wall time minus its steps of training and of validation, each at
the median of its kind: starting loaders, the first batches, the checkpoint (200 MB for resnet50 and
its momentum), the records. Both loops have the same images, batch, threads and workers; the time
goes from the first step of an epoch to the first of the next. The images are small, 32 px, so that
the steps are short and their own ups and downs do not cover what is looked for.
"""

from __future__ import annotations

import itertools
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.bench import (
    CACHE,
    BenchFlags,
    Table,
    interleave,
    make_data,
    median,
    report,
    rounds_flag,
)
from benchmarks.case_process import Case, CaseProcess
from benchmarks.reference_loop import ReferenceLoop, make_loader, run_epochs
from dataset.errors import run_command
from dataset.flags import flag, make_parser, parse_flags
from train import evaluate
from train.run import main as train
from train.step import Trainer

ARCH, SIZE, BATCH, THREADS, WORKERS = "resnet50", 32, 16, 1, 1
CLASSES, TRAIN_PER_CLASS, VAL_PER_CLASS = 8, 32, 16  # 16 steps and 8 batches of validation
REFERENCE, OURS = "reference loop", "ours"
TARGET = 0.25
Marks = list[tuple[str, float]]  # what ended, and when


@dataclass(frozen=True, kw_only=True)
class EpochFlags(BenchFlags):
    """The flags of benchmarks/epoch_overhead.py."""

    rounds: int = rounds_flag(3)
    epochs: int = flag(6, "a round; the last is not counted")


def main() -> int:
    flags = parse_flags(EpochFlags, make_parser(__doc__))
    data = make_data(CLASSES, TRAIN_PER_CLASS, VAL_PER_CLASS, "500x375")
    cases = {
        REFERENCE: partial(measure, make_reference, data, flags.epochs),
        OURS: partial(measure, make_ours, data, flags.epochs),
    }
    runs = interleave(cases, flags.rounds)
    result: dict[str, Any] = {"arch": ARCH, "image_size": SIZE, "batch": BATCH}
    result["rounds"] = flags.rounds
    result["epochs"] = {
        name: [cost for run in found for cost in run] for name, found in runs.items()
    }
    return report("epoch_overhead", result, tables, flags)


def measure(make: Callable[..., Case], data: Path, epochs: int) -> list[dict[str, float]]:
    """The fixed costs of some epochs that ran in a new process."""
    process = CaseProcess(make, data, epochs)
    try:
        return fixed_costs(process.ask("run"))
    finally:
        process.close()


def fixed_costs(marks: Marks) -> list[dict[str, float]]:
    """Of every epoch that another follows: its wall time, its steps, and what is left."""
    first = [
        number
        for number, (kind, _) in enumerate(marks)
        if kind == "train" and (number == 0 or marks[number - 1][0] == "val")
    ]
    return [_fixed_cost(marks[begin : end + 1]) for begin, end in itertools.pairwise(first)]


def _fixed_cost(marks: Marks) -> dict[str, float]:
    """Of one epoch, from its first step to the first of the next; its own medians are used."""
    gaps: dict[str, list[float]] = {"train": [], "val": []}
    for (before, before_s), (kind, end_s) in itertools.pairwise(marks):
        if kind == before:
            gaps[kind].append(end_s - before_s)
    wall_s = marks[-1][1] - marks[0][1]
    steps_s = sum(median(gaps[kind]) for kind, _ in marks[1:])
    return {"wall_s": wall_s, "steps_s": steps_s, "fixed_s": wall_s - steps_s}


def make_ours(data: Path, epochs: int) -> Case:
    """Runs in a process of its own: `python -m train`, with a mark after each step."""
    marks: Marks = []

    def marking(kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def marked(*args: Any, **kwargs: Any) -> Any:
            answer = call(*args, **kwargs)
            marks.append((kind, time.perf_counter()))
            return answer

        return marked

    def run(_what: str) -> Marks:
        argv = [str(data), "-a", ARCH, "-b", str(BATCH), "--image-size", str(SIZE)]
        argv += ["--epochs", str(epochs), "-j", str(WORKERS), "--threads", str(THREADS)]
        argv += ["--device", "cpu", "--recipe", "reference", "--lr", str(0.1 * BATCH / 256)]
        argv += ["--output", str(empty_folder())]
        with (
            mock.patch.object(Trainer, "run_step", marking("train", Trainer.run_step)),
            mock.patch.object(evaluate, "_add_batch", marking("val", evaluate._add_batch)),
            mock.patch.object(sys, "stdout", sys.stderr),
        ):
            code = train(argv)
        assert code == 0, code
        return marks

    return run


def make_reference(data: Path, epochs: int) -> Case:
    """Runs in a process of its own: the reference loop, with a mark after each step."""
    torch.set_num_threads(THREADS)
    marks: Marks = []

    def run(_what: str) -> Marks:
        loop = ReferenceLoop(ARCH, CLASSES, lr=0.1 * BATCH / 256)
        loaders = {s: make_loader(data, s, SIZE, BATCH, WORKERS) for s in ("train", "val")}
        mark = lambda kind: marks.append((kind, time.perf_counter()))  # noqa: E731
        run_epochs(loop, loaders, epochs, empty_folder(), mark)
        return marks

    return run


def empty_folder() -> Path:
    """Where a run writes its checkpoints: on the same disk for both loops."""
    folder = CACHE / "epoch_overhead"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def tables(result: dict[str, Any]) -> list[Table]:
    """The parts of an epoch, and our fixed cost against the reference's."""
    fixed = {
        name: median([epoch["fixed_s"] for epoch in epochs])
        for name, epochs in result["epochs"].items()
    }
    rows = []
    for name, epochs in result["epochs"].items():
        steps_s = median([epoch["steps_s"] for epoch in epochs])
        ratio = f"{fixed[name] / fixed[REFERENCE]:.2f}"
        target = f"at most {TARGET}" if name == OURS else ""
        rows.append([name, f"{steps_s:.2f}", f"{fixed[name]:.2f}", ratio, target])
    title = (
        f"{result['arch']} at {result['image_size']} px, batch {result['batch']}, "
        f"{THREADS} thread and {WORKERS} worker, median of {len(epochs)} epochs"
    )
    header = ["loop", "steps of an epoch, s", "fixed cost, s", "against the reference", "target"]
    return [(title, header, rows)]


if __name__ == "__main__":
    sys.exit(run_command(main))
