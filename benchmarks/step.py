"""How long is an optimiser step? Ours against pytorch/examples' loop, data in memory, two cores.

    python benchmarks/step.py --rounds 10

Every way is a process of its own that holds its model and sleeps while another is measured, since
how memory is allocated is a property of a process. Ours takes uint8 images and normalises them in
the step; the reference loop is given float images that are normalised already. Each optimisation
is also toggled alone; its gain is the step time then, relative to ours.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.bench import (
    BenchFlags,
    Table,
    describe_ratio,
    interleave,
    median,
    report,
    rounds_flag,
)
from benchmarks.case_process import Case, CaseProcess
from benchmarks.reference_loop import ReferenceLoop
from benchmarks.trainer_step import (
    CPU,
    NUM_CLASSES,
    make_labels,
    make_pixels,
    make_step,
    make_trainer,
    normalise_for_reference,
)
from dataset.errors import run_command
from dataset.flags import flag, make_parser, parse_flags
from train.device import keep_freed_memory, prefers_channels_last
from train.ranks.comm import Comm
from train.ranks.launch import detect_launch

REFERENCE, OURS = "reference loop", "ours"
TARGETS = {224: 1.1, 64: 1.0}


@dataclass(frozen=True)
class Measures:
    """What makes our step faster; each can be left out."""

    channels_last: bool
    kept_memory: bool = True
    fused: bool = True
    compile: bool = False


@dataclass(frozen=True)
class Task:
    """One size of images, and how much of it a round measures."""

    size: int
    arch: str
    batch: int
    steps: int


TASKS = (Task(224, "resnet50", 8, 1), Task(64, "resnet18", 32, 4))


@dataclass(frozen=True, kw_only=True)
class StepFlags(BenchFlags):
    """The flags of benchmarks/step.py."""

    rounds: int = rounds_flag(10)
    threads: int = flag(2, None)
    compile: bool = flag(False, "also with --compile (minutes)")


def main() -> int:
    flags = parse_flags(StepFlags, make_parser(__doc__))
    result: dict[str, Any] = {"threads": flags.threads, "rounds": flags.rounds}
    for task in TASKS:
        ways = name_ways(task, flags.compile)
        result[str(task.size)] = describe(task, measure(task, ways, flags.rounds, flags.threads))
    return report("step", result, tables, flags)


def name_ways(task: Task, use_compile: bool) -> dict[str, Measures | None]:
    """The reference loop, ours, and ours with one optimisation toggled."""
    own = Measures(prefers_channels_last(CPU, "fp32", task.size))
    other = "without channels_last" if own.channels_last else "with channels_last"
    ways: dict[str, Measures | None] = {REFERENCE: None, OURS: own}
    ways[f"{OURS} {other}"] = replace(own, channels_last=not own.channels_last)
    ways[f"{OURS} without kept memory"] = replace(own, kept_memory=False)
    ways[f"{OURS} without the fused optimiser"] = replace(own, fused=False)
    if use_compile:
        ways[f"{OURS} with --compile"] = replace(own, compile=True)
    return ways


def measure(
    task: Task, ways: dict[str, Measures | None], rounds: int, threads: int
) -> dict[str, list[float]]:
    """Seconds a step of each way, round by round."""
    processes: dict[str, CaseProcess] = {}
    try:
        for name, measures in ways.items():
            processes[name] = CaseProcess(make_case, task, measures, threads)
        for process in processes.values():
            process.ask("warm up")
            process.ask("warm up")
        cases = {name: partial(process.ask, "steps") for name, process in processes.items()}
        return interleave(cases, rounds)
    finally:
        for process in processes.values():
            process.close()


def make_case(task: Task, measures: Measures | None, threads: int) -> Case:
    """Runs in the process of a way: gives the seconds of a step."""
    torch.set_num_threads(threads)
    step = make_reference_step(task) if measures is None else make_our_step(task, measures)

    def run(_what: str) -> float:
        begin_s = time.perf_counter()
        for _ in range(task.steps):
            step()
        return (time.perf_counter() - begin_s) / task.steps

    return run


def make_reference_step(task: Task) -> Callable[[], None]:
    loop = ReferenceLoop(task.arch, NUM_CLASSES, lr=0.1 * task.batch / 256)
    images = normalise_for_reference(make_pixels(task.batch, task.size))
    return partial(loop.step, images, make_labels(task.batch))


def make_our_step(task: Task, measures: Measures) -> Callable[[], None]:
    if measures.kept_memory:
        keep_freed_memory()
    trainer = make_trainer(
        task.arch,
        task.size,
        task.batch,
        Comm(detect_launch({})),
        channels_last=measures.channels_last,
        use_compile=measures.compile,
    )
    if not measures.fused:
        for group in trainer.optimizer.param_groups:
            group.update(fused=False, foreach=False)
    return make_step(trainer, task.size)


def describe(task: Task, values: dict[str, list[float]]) -> dict[str, Any]:
    """The record of a size."""
    return {"arch": task.arch, "batch": task.batch, "seconds": values}


def tables(result: dict[str, Any]) -> list[Table]:
    """A table for each size."""
    return [_table(size, result[size], result["rounds"]) for size in ("224", "64")]


def _table(size: str, record: dict[str, Any], rounds: int) -> Table:
    ways = record["seconds"]
    rows = []
    for name, seconds in ways.items():
        target = f"at least {TARGETS[int(size)]:.1f}x" if name == OURS else ""
        speed = describe_ratio(ways[REFERENCE], seconds) if name != REFERENCE else ""
        slower = describe_ratio(seconds, ways[OURS]) if name != OURS else ""
        rows.append([name, f"{median(seconds):.3f}", speed, target, slower])
    title = f"{size} px, {record['arch']}, batch {record['batch']}, median of {rounds} rounds"
    header = ["way", "s a step", "speed against the reference", "target", "time against ours"]
    return title, header, rows


if __name__ == "__main__":
    sys.exit(run_command(main))
