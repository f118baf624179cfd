"""What does the exchange of gradients cost? Two ranks of one thread, with it and without it.

    python benchmarks/ddp.py --rounds 8

resnet50 at 224 px, 8 images a rank, gloo on loopback. The efficiency is the time of a step of two
ranks that do not exchange anything (DDP's no_sync) over that of two ranks that do: two cores of one
machine share its memory bandwidth, so that one rank alone, which is shown too, is no fair baseline.
Ours exchanges gradients, batch-norm statistics and stop votes; the reference loop, DDP as
pytorch/examples uses it, gradients and buffers.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from benchmarks.bench import (
    Table,
    interleave,
    make_parser,
    median,
    median_ratio,
    print_table,
    write_result,
)
from benchmarks.held import Case, Held, ask_all
from benchmarks.ours import (
    NUM_CLASSES,
    make_labels,
    make_pixels,
    make_step,
    make_trainer,
    normalise_for_reference,
)
from benchmarks.reference import ReferenceLoop
from dataset.errors import run_command
from train.ranks.comm import Comm
from train.device import keep_freed_memory
from train.ranks.interrupt import Interrupt
from train.ranks.launch import detect_launch
from train.norm import StepStatistics

ARCH, SIZE, BATCH, WORLD = "resnet50", 224, 8, 2
SYNCED, APART, ALONE = "2 ranks", "2 ranks under no_sync", "1 rank alone"
WANTED = 0.92


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1, help="a round and a way")
    args = parser.parse_args()
    groups = {
        "ours": start_ranks(make_ours, args.steps),
        "reference": start_ranks(make_reference, args.steps),
    }
    try:
        values = measure(groups, args.rounds)
    finally:
        for group in groups.values():
            for held in group:
                held.close()
    result: dict[str, Any] = {"arch": ARCH, "batch_per_rank": BATCH, "rounds": args.rounds}
    result |= {"wanted": WANTED, "seconds": values}
    for table in tables(result):
        print_table(*table)
    print("\nwritten to", write_result("ddp", result))
    return 0


def measure(groups: dict[str, list[Held]], rounds: int) -> dict[str, list[float]]:
    """Seconds a step of each way, round by round."""
    cases: dict[str, Callable[[], float]] = {}
    for name, group in groups.items():
        for way in (SYNCED, APART):
            ask_all(group, way)  # warm up
            cases[f"{name}: {way}"] = partial(ask_all, group, way)
        cases[f"{name}: {ALONE}"] = partial(ask_all, group[:1], APART)
    return interleave(cases, rounds)


def start_ranks(make: Callable[..., Case], steps: int) -> list[Held]:
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
        group.append(Held(make, steps, env={name: str(value) for name, value in env.items()}))
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
    statistics = {SYNCED: trainer.statistics, APART: StepStatistics(trainer.model, 1, 1)}

    def run(way: str) -> float:
        trainer.statistics = statistics[way]
        if way == SYNCED:
            return seconds_a_step(synced, steps)
        with ddp.no_sync():
            return seconds_a_step(apart, steps)

    return run


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


def efficiency(result: dict[str, Any], name: str) -> float:
    """The share of a step that is left when the ranks exchange nothing."""
    seconds = result["seconds"]
    return median_ratio(seconds[f"{name}: {APART}"], seconds[f"{name}: {SYNCED}"])


def tables(result: dict[str, Any]) -> list[Table]:
    """Seconds a step, and the efficiency of both loops."""
    rows = []
    for case, seconds in result["seconds"].items():
        name, _, way = case.partition(": ")
        row = [case, f"{median(seconds):.3f}", "", ""]
        if way == SYNCED:
            row[2] = f"{efficiency(result, name):.1%}"
        if case == f"ours: {SYNCED}":
            least = max(result["wanted"], efficiency(result, "reference"))
            row[3] = f"at least {least:.1%}"
        rows.append(row)
    title = (
        f"{result['arch']} at 224 px, {result['batch_per_rank']} images and 1 thread a rank, "
        f"median of {result['rounds']} rounds"
    )
    return [(title, ["way", "s a step", "efficiency", "wanted"], rows)]


if __name__ == "__main__":
    sys.exit(run_command(main))
