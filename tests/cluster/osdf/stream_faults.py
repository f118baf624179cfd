"""What faults do to the ways of benchmarks/stream.py: a flipped byte, a kill, a silent cache.

Each is tried on a small set. A sample is known by the crc32 of its bytes, as the decoder had them.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import statistics
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.bench import measure_undisturbed
from benchmarks.stream_data import StreamSet, read_samples
from benchmarks.stream_promises import FETCHER, SILENT, STREAM
from dataset.names import INDEX_SUFFIX, TRAIN_TAR
from dataset.stream.arrivals import ArrivalMap
from tests.cluster.osdf import service, stream_ways
from tests.cluster.osdf.rules import Fault
from tests.cluster.osdf.stream_serving import Served, converted, read_object
from tests.cluster.osdf.stream_ways import Run
from tests.cluster.osdf.streamed_runs import find_map

log = logging.getLogger("trainyard")
SMALL = StreamSet(10, 16, 24_000_000)
SMALL_BATCH, SMALL_STEP_S = 8, 0.05
SMALL_RATE = 4e6  # the tar is still arriving when a streamed run is killed
VICTIM, INSIDE = 77, 1500  # the image whose byte is flipped, and where in it
KILL_AT = 8  # steps of 20
# The set whose epochs are timed: 8 s of link, half as much compute.
TIMED = StreamSet(20, 80, 200_000_000)
TIMED_BATCH, TIMED_RATE, TIMED_STEP_S, TIMED_RTT_S = 32, 25e6, 0.08, 0.02
SHARE_HERE = 0.4  # of the tar, when a fault begins
WINDOWS = 10  # of the order, in one set
POLL_S = 0.02


def check_right(name: str, work: Path, python: Path) -> dict[str, str]:
    """Whether a way trains on the right bytes after a flipped one, and goes on after a kill."""
    SMALL.make()
    served = Served(SMALL.folder, [TRAIN_TAR, TRAIN_TAR + INDEX_SUFFIX])
    run = Run(SMALL, served.paths[0], work / "small", SMALL_BATCH, SMALL_STEP_S, epochs=1)
    run = replace(run, window_bytes=SMALL.num_bytes // WINDOWS, is_traced=True, python=python)
    try:
        with converted(name, run, work) as (ready, _):
            found = {"flip": try_flip(name, ready), "kill": try_kill(name, ready)}
    finally:
        served.close()
    log.info("%s: %s", name, found)
    return found


def truth() -> list[int]:
    """The checksums of all images."""
    return sorted(zlib.crc32(image) for _, image in read_samples(SMALL.tar))


def try_flip(name: str, run: Run) -> str:
    """yes: all is right; no: a wrong image was trained; refused: none, but the run failed."""
    shutil.rmtree(run.folder, ignore_errors=True)
    [(_, victim)] = read_samples(SMALL.tar, [VICTIM])
    faults = []
    for path in run.shards or (run.path,):
        place = read_object(path).find(victim)
        if place >= 0:
            faults.append(Fault("flip", server="cache1", path=path, at=[place + INSIDE]))
    [fault] = faults
    with service.faults(fault) as handle:
        has_ended = stream_ways.finish(name, run, must_succeed=False)
        was_flipped = sum(handle.hits()) > 0
    trained = [crc for crcs in run.story.crcs.values() for crc in crcs if crc != -1]
    if not was_flipped:
        return "not tried"
    if set(trained) - set(truth()):
        return "no"
    if not has_ended:
        return "refused"
    return "yes" if zlib.crc32(victim) in trained else "left out"


def try_kill(name: str, run: Run) -> str:
    """yes: the same command trains each sample of the epoch once, over the kill."""
    shutil.rmtree(run.folder, ignore_errors=True)
    with service.link(SMALL_RATE):
        stream_ways.kill_at_step(name, run, KILL_AT)
    for left in run.folder.glob("trainyard-stream-*"):
        shutil.rmtree(left)
    if not stream_ways.finish(name, run, must_succeed=False):
        return "no: it does not start again"
    trained = [crc for crcs in run.story.crcs.values() for crc in crcs]
    return "yes" if sorted(trained) == truth() else "no"


def measure_lost(work: Path, rounds: int) -> dict[str, Any]:
    """Seconds from the first step to the end of epoch 1, with and without a fault."""
    TIMED.make()
    served = Served(TIMED.folder, [TRAIN_TAR, TRAIN_TAR + INDEX_SUFFIX])
    run = Run(TIMED, served.paths[0], work / "timed", TIMED_BATCH, TIMED_STEP_S, epochs=1)
    run = replace(run, window_bytes=TIMED.num_bytes // WINDOWS)
    cases: dict[str, Callable[[Run, ArrivalMap], Callable[[], None]]] = {
        "clean": lambda run, arrivals: lambda: None,
        FETCHER: kill_fetcher,
        SILENT: silence_cache,
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    try:
        for number in range(rounds):
            for name, strike in cases.items():
                case = partial(time_epoch, run, strike)
                seconds[name].append(measure_undisturbed(case, service.processes()))
                log.info("round %d, %s: %.1f s", number + 1, name, seconds[name][-1])
    finally:
        served.close()
    clean_s = statistics.median(seconds["clean"])
    lost = {name: statistics.median(seconds[name]) - clean_s for name in (FETCHER, SILENT)}
    return {"rounds": rounds, "seconds": seconds, "lost": lost}


def kill_fetcher(run: Run, arrivals: ArrivalMap) -> Callable[[], None]:
    os.kill(arrivals.pid, signal.SIGKILL)
    return lambda: None


def silence_cache(run: Run, arrivals: ArrivalMap) -> Callable[[], None]:
    """From now on every answer of one of two caches stops after a third."""
    fault = Fault("stall", server="cache1", path=run.path, after_share=0.3)
    return service.faults(fault).remove


def time_epoch(run: Run, strike: Callable[[Run, ArrivalMap], Callable[[], None]]) -> float:
    """The seconds from the first step to the last of a streamed epoch that a fault strikes."""
    shutil.rmtree(run.folder, ignore_errors=True)
    undo: Callable[[], None] | None = None
    [command] = stream_ways.WAYS[STREAM](run)
    link = service.link(TIMED_RATE, TIMED_RTT_S)
    with link, stream_ways.started(run, command) as process:
        while process.poll() is None:
            arrivals = find_map(run.folder) if undo is None else None
            if arrivals is not None and arrivals.here.mean() >= SHARE_HERE:
                undo = strike(run, arrivals)
            time.sleep(POLL_S)
        if undo is not None:
            undo()
    assert process.returncode == 0 and undo is not None, (run.folder / "log").read_text()[-3000:]
    ended_s = run.story.ended_s
    return ended_s[run.steps] - ended_s[1]
