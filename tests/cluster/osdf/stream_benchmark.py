"""The measuring part of benchmarks/stream.py: every way to train, against the mini-OSDF.

benchmarks/stream.py runs it as `python -m tests.cluster.osdf.stream_benchmark`, and judges.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks.bench import CACHE, repeat_disturbed
from benchmarks.machine_load import MachineLoad
from benchmarks.osg_week_model import OBJECT_BYTES
from benchmarks.stream_data import StreamSet
from benchmarks.stream_promises import (
    DISK_SHARES,
    LOCAL,
    LOCAL_SLOW,
    MOSAIC,
    ONCE,
    SHUFFLED,
    SLOW_STEP,
    STREAM,
    TWO_NODES,
    UNPROMISED,
)
from benchmarks.stream_venv import find_mosaic
from dataset.archive.units import UNIT_SIZE
from dataset.errors import run_command
from dataset.flags import REQUIRED, flag, make_parser, parse_flags
from dataset.names import INDEX_SUFFIX, TRAIN_TAR
from dataset.stream.spec import StreamSpec
from tests.cluster.osdf import service, stream_ways
from tests.cluster.osdf.stream_faults import check_right, measure_lost
from tests.cluster.osdf.stream_serving import Served, converted
from tests.cluster.osdf.stream_ways import WAYS, Run
from train.data.streamed_order import MIN_BYTES
from train.data.unit_needs import UNITS_A_CONNECTION

log = logging.getLogger("trainyard")
CLASSES, BATCH = 100, 64
MEAN_BYTES = 112_000
LEAST_BYTES = 1 << 20
SLOWER = 3.0  # the compute of SLOW_STEP, in that of the others


@dataclass(frozen=True, kw_only=True)
class MeasureFlags:
    """What benchmarks/stream.py asks for."""

    answer: Path = flag(REQUIRED, "the result goes to this file, as JSON", "ANSWER")
    rounds: int = flag(REQUIRED, None)
    fault_rounds: int = flag(REQUIRED, None)
    megabytes: int = flag(REQUIRED, None)
    rate: float = flag(REQUIRED, None)
    rtt: float = flag(REQUIRED, None)
    compute: float = flag(REQUIRED, None)
    ways: str = flag("", None)


def main() -> int:
    """Starts the mini-OSDF if it is down, measures, and leaves it as it was."""
    flags = parse_flags(MeasureFlags, make_parser(__doc__))
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.INFO)
    was_up = service.is_up()
    service.up()
    work = CACHE / "stream-work"
    shutil.rmtree(work, ignore_errors=True)
    try:
        result = Bench(flags, work).run()
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if not was_up:
            service.down()
    flags.answer.write_text(json.dumps(result))
    return 0


class Bench:
    """The set at the origin, and the ways to train on it."""

    def __init__(self, flags: MeasureFlags, work: Path) -> None:
        self.flags, self.work = flags, work
        per_class = max(16, round(flags.megabytes * 1e6 / MEAN_BYTES / CLASSES / 16) * 16)
        self.data = StreamSet(CLASSES, per_class, flags.megabytes * 10**6)
        self.rate = flags.rate * 1e6
        self.mosaic = find_mosaic()
        chosen = flags.ways.split(";") if flags.ways else list(WAYS)
        self.ways = [name for name in WAYS if name in chosen]
        if self.mosaic is None:
            self.ways = [name for name in self.ways if name != MOSAIC]

    def run(self) -> dict[str, Any]:
        log.info("making the data: %s", self.data.folder)
        self.data.make()
        served = Served(self.data.folder, [TRAIN_TAR, TRAIN_TAR + INDEX_SUFFIX])
        self.ways = [name for name in self.ways if self.has_room(name)]
        rows: dict[str, list[dict[str, Any]]] = {name: [] for name in self.ways}
        try:
            for number in range(self.flags.rounds):
                for name in self.ways:
                    if name in UNPROMISED and number >= ONCE:
                        continue
                    run = self.make_run(name, served.paths[0])
                    measured = partial(self.measure, name, run)
                    rows[name].append(repeat_disturbed(measured, itemgetter("others_share")))
                    log.info("round %d, %s: %s", number + 1, name, rows[name][-1])
        finally:
            served.close()
        others = {LOCAL, LOCAL_SLOW, SHUFFLED, SLOW_STEP, TWO_NODES, *DISK_SHARES}  # as STREAM
        tried = [name for name in self.ways if name not in others]
        right = {name: check_right(name, self.work, self.python(name)) for name in tried}
        lost = measure_lost(self.work, self.flags.fault_rounds) if STREAM in self.ways else {}
        return self.describe() | {"rows": rows, "right": right, "lost_s": lost}

    def has_room(self, name: str) -> bool:
        """Whether a disk holds what is in use, about two windows, and on its way.

        15 % of a small tar do not.
        """
        size = self.data.tar.stat().st_size
        in_flight = UNITS_A_CONNECTION * StreamSpec.connections * UNIT_SIZE
        least = in_flight + 3 * self.window_bytes
        if name not in DISK_SHARES or DISK_SHARES[name] * size >= least:
            return True
        log.info("%s: left out, it needs %.0f MB or more", name, least / DISK_SHARES[name] / 1e6)
        return False

    @property
    def window_bytes(self) -> int:
        """The window of the order is the share of the set that the real one is."""
        return int(MIN_BYTES * self.data.tar.stat().st_size / OBJECT_BYTES)

    def describe(self) -> dict[str, Any]:
        """What was asked for, and what follows from it."""
        num_bytes = self.data.tar.stat().st_size
        return {
            "tar_bytes": num_bytes,
            "index_bytes": self.data.index.stat().st_size,
            "images": CLASSES * self.data.per_class,
            "classes": CLASSES,
            "batch": BATCH,
            "steps": CLASSES * self.data.per_class // BATCH,
            "rate": self.rate,
            "rtt_s": self.flags.rtt,
            "link_s": num_bytes / self.rate,
            "compute_s": self.compute_s,
            "slow_compute_s": SLOWER * self.compute_s,
            "has_mosaic": self.mosaic is not None,
        }

    @property
    def compute_s(self) -> float:
        """The compute of an epoch, a share of the time that the link takes for the tar."""
        return self.flags.compute * self.data.tar.stat().st_size / self.rate

    def python(self, name: str) -> Path:
        return self.mosaic if name == MOSAIC and self.mosaic else Path(sys.executable)

    def make_run(self, name: str, path: str) -> Run:
        """A run of a way."""
        is_slow = name in (SLOW_STEP, LOCAL_SLOW)
        is_short = is_slow or name == SHUFFLED
        steps = CLASSES * self.data.per_class // BATCH
        step_s = self.compute_s * (SLOWER if is_slow else 1) / steps
        epochs = 1 if is_short else 2
        run = Run(self.data, path, self.work / "run", BATCH, step_s, epochs, self.window_bytes)
        return replace(run, python=self.python(name))

    def measure(self, name: str, run: Run) -> dict[str, Any]:
        """First step, epochs, bytes and requests of one training over the link."""
        with converted(name, run, self.work) as (run, conversion_s):
            shutil.rmtree(run.folder, ignore_errors=True)
            service.forget_traffic()
            load = MachineLoad(service.processes())
            with service.link(self.rate, self.flags.rtt):
                begin_s = time.monotonic()
                stream_ways.finish(name, run)
            traffic = [] if name in (LOCAL, LOCAL_SLOW) else service.traffic()
            story = run.story
            first_epoch_s = run.find_end(1)
            is_long = run.epochs > 1
            row = {
                "conversion_s": conversion_s,
                "first_step_s": conversion_s + story.ended_s[1] - begin_s,
                "epoch_1_s": conversion_s + first_epoch_s - begin_s,
                "epoch_2_s": run.find_end(2) - first_epoch_s if is_long else None,
                "bytes": sum(entry["bytes"] for entry in traffic),
                "requests": len(traffic),
                "transfer_s": time_transfer(traffic),
                "first_bytes": story.first_bytes,
                "others_share": load.foreign_share(),
            }
            shutil.rmtree(run.folder, ignore_errors=True)
        return row


def time_transfer(traffic: list[dict[str, Any]]) -> float:
    """Seconds from the first to the last answer with more in it than a look at the object."""
    real = [entry for entry in traffic if entry["bytes"] >= LEAST_BYTES and entry["ended_s"]]
    if not real:
        return 0.0
    begin_s = min(entry["started_s"] for entry in real)
    return float(max(entry["ended_s"] for entry in real) - begin_s)


if __name__ == "__main__":
    sys.exit(run_command(main))
