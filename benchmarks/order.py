"""What does a streamed order of ImageNet's size cost against the uniform one?

    python benchmarks/order.py --rounds 5

1,281,000 samples in 1,000 classes; the trainer makes an order once an epoch. The units are cut once
a run, from the index.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench import (
    BenchFlags,
    Table,
    describe_ratio,
    interleave,
    median,
    report,
    rounds_flag,
)
from dataset.archive.units import Units, cut_units
from dataset.errors import run_command
from dataset.flags import make_parser, parse_flags
from train.data.sampler import epoch_order
from train.data.streamed_order import Layout, choose_window, streamed_order

CLASSES, PER_CLASS, BATCH = 1000, 1281, 256
UNIFORM, STREAMED, CUTS = "uniform order", "streamed order", "cuts and their digest"
TARGET_S = 0.6


@dataclass(frozen=True, kw_only=True)
class OrderFlags(BenchFlags):
    """The flags of benchmarks/order.py."""

    rounds: int = rounds_flag(5)


def main() -> int:
    flags = parse_flags(OrderFlags, make_parser(__doc__))
    units = cut()
    layout = Layout(units.unit, units.group, int(units.bounds[-1]))
    window = choose_window(layout, BATCH)
    cases: dict[str, Callable[[], float]] = {
        UNIFORM: lambda: measure(lambda: epoch_order(0, 0, len(layout))),
        STREAMED: lambda: measure(lambda: streamed_order(0, 0, layout, window)),
        CUTS: lambda: measure(lambda: cut().digest),
    }
    seconds = interleave(cases, flags.rounds)
    result = {"rounds": flags.rounds, "samples": len(layout), "units": len(units)}
    return report("order", result | {"window": window, "seconds": seconds}, tables, flags)


def cut() -> Units:
    """The units of a tar of class tars, all images of one size."""
    num = CLASSES * PER_CLASS
    offset = np.arange(num) * (112 << 10) + 512
    label = np.repeat(np.arange(CLASSES), PER_CLASS)
    return cut_units(offset, np.full(num, 110_000), label, num * (112 << 10) + 1024)


def measure(call: Callable[[], object]) -> float:
    """The seconds of a call."""
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def tables(result: dict[str, Any]) -> list[Table]:
    """Seconds, and the ratio to the uniform order."""
    seconds = result["seconds"]
    rows = [
        [name, f"{median(values):.3f}", describe_ratio(values, seconds[UNIFORM])]
        for name, values in seconds.items()
    ]
    title = (
        f"{result['samples']} samples in {result['units']} units, a window of {result['window']}, "
        f"medians of {result['rounds']} interleaved rounds "
        f"(target: a streamed order within {TARGET_S} s)"
    )
    return [(title, ["what", "seconds", "time / uniform"], rows)]


if __name__ == "__main__":
    sys.exit(run_command(main))
