"""What does the exchange of gradients cost? Two ranks of one thread, with it and without it.

    python benchmarks/ddp.py --rounds 8

resnet50 at 224 px, 8 images a rank, gloo on loopback. Two shares of a step of two ranks are shown.
"no_sync / sync" is the time of a step in which the two ranks exchange nothing (DDP's no_sync) over
that of a step in which they do: what the exchange costs. "1 rank / 2 ranks" is the time of a step
of one rank alone over that of two: the usual weak-scaling efficiency, which also contains that two
cores of one machine share its memory bandwidth.
Ours exchanges gradients, batch-norm statistics and stop votes; the reference loop, DDP as
pytorch/examples uses it, gradients and buffers.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from benchmarks.bench import (
    BenchFlags,
    Table,
    describe_ratio,
    interleave,
    median,
    report,
    round_ratios,
    rounds_flag,
)
from benchmarks.case_process import Case, CaseProcess, ask_all
from benchmarks.reference_loop import ReferenceLoop
from benchmarks.trainer_step import (
    NUM_CLASSES,
    make_labels,
    make_pixels,
    make_step,
    make_trainer,
    normalise_for_reference,
)
from dataset.errors import run_command
from dataset.flags import flag, make_parser, parse_flags
from train.device import keep_freed_memory
from train.network.batch_norm import StepStatistics
from train.ranks.comm import Comm
from train.ranks.interrupt import Interrupt
from train.ranks.launch import detect_launch

ARCH, SIZE, BATCH, WORLD = "resnet50", 224, 8, 2
SYNCED, APART, ALONE = "2 ranks", "2 ranks under no_sync", "1 rank alone"
TARGET = 0.92  # of SHARES["no_sync / sync"]
SHARES = {"no_sync / sync": APART, "1 rank / 2 ranks": ALONE}  # over SYNCED


@dataclass(frozen=True, kw_only=True)
class DdpFlags(BenchFlags):
    """The flags of benchmarks/ddp.py."""

    rounds: int = rounds_flag(8)
    steps: int = flag(1, "a round and a way")


def main() -> int:
    flags = parse_flags(DdpFlags, make_parser(__doc__))
    groups = {
        "ours": start_ranks(make_ours, flags.steps),
        "reference": start_ranks(make_reference, flags.steps),
    }
    try:
        values = measure(groups, flags.rounds)
    finally:
        for group in groups.values():
            for process in group:
                process.close()
    result: dict[str, Any] = {"arch": ARCH, "batch_per_rank": BATCH, "rounds": flags.rounds}
    result["seconds"] = values
    return report("ddp", result, tables, flags)


def measure(groups: dict[str, list[CaseProcess]], rounds: int) -> dict[str, list[float]]:
    """Seconds a step of each way, round by round."""
    cases: dict[str, Callable[[], float]] = {}
    for name, group in groups.items():
        for way in (SYNCED, APART):
            ask_all(group, way)  # warm up
            cases[f"{name}: {way}"] = partial(ask_all, group, way)
        cases[f"{name}: {ALONE}"] = partial(ask_all, group[:1], APART)
    return interleave(cases, rounds)


def start_ranks(make: Callable[..., Case], steps: int) -> list[CaseProcess]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = []
    for rank in range(WORLD):
        env: dict[str, Any] = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": WORLD,
            "LOCAL_WORLD_SIZE": WORLD,
        }
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        env["GLOO_SOCKET_IFNAME"] = "lo"
        group.append(
            CaseProcess(make, steps, env={name: str(value) for name, value in env.items()})
        )
    return group


def make_ours(steps: int) -> Case:
    """Runs in a rank: the trainer's step, as `python -m train` does it on two ranks."""
    torch.set_num_threads(1)
    keep_freed_memory()
    comm = Comm(detect_launch(os.environ))
    comm.join(torch.device("cpu"), 120)
    trainer = make_trainer(ARCH, SIZE, BATCH, comm)
    interrupt = Interrupt(comm, None)
    synced = make_step(trainer, SIZE, lambda left_s: interrupt.agree(left_s, 0.0))
    apart, ddp = make_step(trainer, SIZE), trainer.ddp
    assert ddp is not None
    statistics = {SYNCED: trainer.statistics, APART: make_own_statistics(trainer.model)}

    def run(way: str) -> float:
        trainer.statistics = statistics[way]
        if way == SYNCED:
            return seconds_a_step(synced, steps)
        with ddp.no_sync():
            return seconds_a_step(apart, steps)

    return run


def make_own_statistics(model: torch.nn.Module) -> StepStatistics:
    """Statistics that exchange nothing; the trainer's own have hidden the layers' counters."""
    for layer in model.modules():
        layer.__dict__.pop("num_batches_tracked", None)
    return StepStatistics(model, 1, 1)


def make_reference(steps: int) -> Case:
    """Runs in a rank: the reference loop's step under DDP."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loop = ReferenceLoop(ARCH, NUM_CLASSES, lr=0.1 * BATCH * WORLD / 256, distributed=True)
    images = normalise_for_reference(make_pixels(BATCH, SIZE))
    step = partial(loop.step, images, make_labels(BATCH))

    def run(way: str) -> float:
        if way == SYNCED:
            return seconds_a_step(step, steps)
        with loop.no_sync():
            return seconds_a_step(step, steps)

    return run


def seconds_a_step(step: Callable[[], None], steps: int) -> float:
    begin_s = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - begin_s) / steps


def shares(result: dict[str, Any], name: str, over: str) -> list[float]:
    """Of each round: the time of a step of the way `over` over that of two ranks that exchange."""
    seconds = result["seconds"]
    return round_ratios(seconds[f"{name}: {over}"], seconds[f"{name}: {SYNCED}"])


def tables(result: dict[str, Any]) -> list[Table]:
    """Seconds a step, and both shares of both loops."""
    seconds = [[case, f"{median(values):.3f}"] for case, values in result["seconds"].items()]
    title = (
        f"{result['arch']} at 224 px, {result['batch_per_rank']} images and 1 thread a rank, "
        f"median of {result['rounds']} rounds"
    )
    rows = []
    for share, over in SHARES.items():
        ours, theirs = shares(result, "ours", over), shares(result, "reference", over)
        row = [share, f"{median(ours):.1%}", f"{median(theirs):.1%}", describe_ratio(ours, theirs)]
        rows.append([*row, f"at least {TARGET:.0%}" if over == APART else ""])
    header = ["time of a step", "ours", "reference", "ours / reference", "target"]
    return [(title, ["way", "s a step"], seconds), ("Shares of a step", header, rows)]


if __name__ == "__main__":
    sys.exit(run_command(main))
