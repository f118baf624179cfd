"""What does the loader do while reads wait for a shared disk? Ours against a thread for each core.

    python benchmarks/loader_latency.py --rounds 5

Every read of the source sleeps some milliseconds first, as a thread does that waits for a disk or a
server, and then finds the image in memory. The peer is the same loader with as many threads as
cores, each of which reads an image and then decodes it. Ours has more threads, of which as many as
there are cores may decode at a time. The images are those of benchmarks/loader.py.
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
    make_data,
    median,
    report,
    rounds_flag,
)
from benchmarks.loader import BATCH, WORKERS, load_ours, rate
from dataset.errors import run_command
from dataset.flags import make_parser, parse_flags
from train.data.loader import count_readers
from train.data.sources import Source
from train.data.splits import Dataset, open_dataset

DELAYS_MS = (0, 5, 10)
PEER, OURS = "a thread for each core", "ours"
TARGETS = {0: 0.95, 5: 2.0, 10: 2.0}


class SlowSource:
    """A source whose reads take longer."""

    def __init__(self, source: Source, delay_ms: float) -> None:
        self._source, self._delay_s = source, delay_ms / 1000

    def __len__(self) -> int:
        return len(self._source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def read(self, index: int) -> bytes:
        if self._delay_s:
            time.sleep(self._delay_s)
        return self._source.read(index)


@dataclass(frozen=True, kw_only=True)
class LatencyFlags(BenchFlags):
    """The flags of benchmarks/loader_latency.py."""

    rounds: int = rounds_flag(5)


def main() -> int:
    flags = parse_flags(LatencyFlags, make_parser(__doc__))
    torch.set_num_threads(1)
    folder = make_data(8, 160, 80, "500x375")
    data = open_dataset(folder / "ILSVRC2012_img_train.tar", None)
    cases = {
        f"{delay_ms} {name}": case
        for delay_ms in DELAYS_MS
        for name, case in make_cases(data, delay_ms).items()
    }
    result = {"rounds": flags.rounds, "images_per_s": interleave(cases, flags.rounds)}
    return report("loader_latency", result, tables, flags)


def make_cases(data: Dataset, delay_ms: int) -> dict[str, Callable[[], float]]:
    """Both ways to load from a source with slow reads."""
    slow = replace(data, train=SlowSource(data.train, delay_ms))
    load = partial(load_ours, slow, "train", "kernel")
    return {PEER: rate(partial(load, num_readers=WORKERS)), OURS: rate(load)}


def tables(result: dict[str, Any]) -> list[Table]:
    """Images a second by the time of a read."""
    rows = []
    for delay_ms in DELAYS_MS:
        peer, ours = (result["images_per_s"][f"{delay_ms} {name}"] for name in (PEER, OURS))
        ratio = describe_ratio(ours, peer)
        rates = [f"{median(values):.0f}" for values in (peer, ours)]
        rows.append([f"{delay_ms} ms", *rates, ratio, f"at least {TARGETS[delay_ms]}x"])
    title = (
        f"train: {WORKERS} cores, batches of {BATCH}, {count_readers(WORKERS)} reading threads, "
        f"median of {result['rounds']} rounds"
    )
    header = ["a read waits", f"{PEER}, images/s", f"{OURS}, images/s", "ratio", "target"]
    return [(title, header, rows)]


if __name__ == "__main__":
    sys.exit(run_command(main))
