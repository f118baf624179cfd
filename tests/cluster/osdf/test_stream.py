"""A training that streams from real XRootD caches is the local run, whatever is killed."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from dataset.errors import BAD_DATA, DONE
from dataset.names import INDEX_SUFFIX
from dataset.own_names import journal_path
from dataset.stream.arrivals import ArrivalMap
from dataset.transfer.journal import CHUNK, num_chunks, read_journal
from tests.cluster.osdf.streamed_runs import (
    STEPS,
    Served,
    check_same_run,
    find_map,
    forget_maps,
    start_run,
)
from tests.dataset.stream.streams import is_alive, wait_until
from tests.dataset.tars import TRAIN
from tests.train import started_ranks as ranks
from tests.train.outcomes import EVERY_STEP, read_trace
from train.records.record import STAGES_FILE, read_lines, read_run

pytestmark = [
    pytest.mark.osdf,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("no_leftovers"),
]
KILLS = ("fetcher", "fetcher", "rank", "fetcher", "both")  # four fetchers in a row would end it
MORE = 1  # MiB: a request that the server sees only when its fetcher is dead
MAX_HEDGED = 0.5  # of the tar: a busy machine hedges much, but a fetcher must not hedge all


def check_each_sample_once(folder: Path) -> None:
    trace = read_trace(folder / "trace")
    for epoch in (0, 1):
        steps = range(epoch * STEPS, (epoch + 1) * STEPS)
        ids = [number for step in steps for part in trace[step].values() for number in part]
        assert sorted(ids) == list(range(8 * STEPS))


def test_a_streamed_run_is_the_local_run_and_fetches_the_object_once(
    served: Served, local: Path, osdf: ModuleType, tmp_path: Path
) -> None:
    osdf.forget_traffic(served.train_path)
    start_run(served.urls, served, tmp_path, "--stream", "always").expect(DONE)
    check_same_run(tmp_path, local, served)
    check_each_sample_once(tmp_path)
    size = (served.folder / TRAIN).stat().st_size
    assert size > 64 << 20
    (attempt,) = read_run(tmp_path / "run")["attempts"]
    hedged = attempt["stream"]["bytes_twice"]["hedged"]  # on a machine too busy to answer
    assert hedged <= MAX_HEDGED * size
    # The origin helps out where caches are too busy.
    assert size / 2 <= osdf.sent_bytes(served.train_path, "cache*")
    assert osdf.sent_bytes(served.train_path) <= 1.02 * size + hedged
    stages = read_lines(tmp_path / "run" / STAGES_FILE)
    (first,) = [s for s in stages if s["stage"] == "train" and s["epoch"] == 0]
    later = [
        entry["bytes"]
        for entry in osdf.traffic(served.train_path)
        if entry["started_s"] > first["start"] + first["seconds"]
    ]
    assert sum(later) == 0  # in epoch 2
    assert attempt["stream"]["is_whole"]
    assert attempt["stream"]["misses"] > 0  # it did not wait for all of it


def survive_kills(
    served: Served, local: Path, osdf: ModuleType, folder: Path, chance: random.Random, num: int
) -> None:
    """A run in which so much is killed, each time when more of the tar is here, and then ends.

    A fetcher that is killed alone is replaced within the same start of the run. Each fetcher is
    sent what it leaves on the disk, and what was on its way to it when it was killed; the last one
    what was missing. So all together are sent the tar once, and what was on its way.
    """
    job: ranks.Job | None = None
    kills: list[Kill] = []
    osdf.forget_traffic(served.train_path)
    with osdf.wan(path=served.train_path, delay_s=0.01, bytes_per_s=2e6):
        for number in range(num):
            share = 0.9 * (number + chance.random()) / num
            job = job or start_run(served.urls, served, folder, *EVERY_STEP)
            job, kill = kill_at(job, folder, KILLS[number % len(KILLS)], share)
            kills.append(kill)
    assert job is None
    wait_until(lambda: all(e["ended_s"] is not None for e in osdf.traffic(served.train_path)))
    check_traffic(osdf.traffic(served.train_path), kills)
    sent_before = osdf.sent_bytes(served.train_path)
    start_run(served.urls, served, folder, *EVERY_STEP).expect(DONE)
    check_same_run(folder, local, served)
    check_each_sample_once(folder)
    size = (served.folder / TRAIN).stat().st_size
    sent = osdf.sent_bytes(served.train_path)
    hedged = read_run(folder / "run")["attempts"][-1]["stream"]["bytes_twice"]["hedged"]
    assert hedged <= MAX_HEDGED * size
    assert sent - sent_before <= size - kills[-1].num_here * CHUNK + hedged + 0.02 * size


@dataclass(frozen=True)
class Kill:
    """One kill of a fetcher, alone or with its rank."""

    ended_s: float  # the fetcher has begun no request after that
    num_here: int  # MiB on the disk
    twice: int  # bytes that came twice in this start of the run up to now


def check_traffic(traffic: list[dict[str, Any]], kills: list[Kill]) -> None:
    """Each fetcher is sent what it adds to the disk, and a MiB on the way on each connection."""
    since_s, num_before = 0.0, 0
    for kill in kills:
        own = [entry for entry in traffic if since_s < entry["started_s"] <= kill.ended_s]
        links = {(entry["server"], entry["connection"]) for entry in own}
        num_links = sum(server != "director" for server, _ in links)
        num_new = kill.num_here - num_before
        bound = (num_new + num_links + MORE) * CHUNK + kill.twice
        assert sum(entry["bytes"] for entry in own) <= bound, (kill, num_new, num_links)
        since_s, num_before = kill.ended_s, kill.num_here


def count_here(folder: Path) -> int:
    """The MiB of the training tar that are on the disk: by its journal, or it is whole."""
    tar = folder / "data" / TRAIN
    arrivals = read_journal(journal_path(tar))
    return len(arrivals.chunks) if arrivals is not None else num_chunks(tar.stat().st_size)


def kill_at(job: ranks.Job, folder: Path, what: str, share: float) -> tuple[ranks.Job | None, Kill]:
    """Kills the rank, its fetcher or both when a share of the tar is here; what goes on."""

    def has_share() -> bool:
        found = find_map(folder)
        return found is not None and bool(found.here.mean() >= share)

    job.wait_for(has_share, f"a share of {share}")
    found = find_map(folder)
    assert found is not None
    pid = found.pid
    if what != "rank":
        os.kill(pid, signal.SIGKILL)
    if what == "fetcher":
        kill = note_kill(found, folder)
        job.wait_for(lambda: found.pid != pid, "the next fetcher")
        return job, kill
    job.send(signal.SIGKILL)
    assert job.wait() == [-signal.SIGKILL]
    wait_until(lambda: not is_alive(pid))  # it dies with its rank
    forget_maps(folder)
    return None, note_kill(found, folder)


def note_kill(found: ArrivalMap, folder: Path) -> Kill:
    """What is there after a kill."""
    twice = sum((found.tally.twice or {}).values())
    return Kill(time.time(), count_here(folder), twice)


def test_twenty_kills_of_rank_and_fetcher_cost_no_sample(
    served: Served, local: Path, osdf: ModuleType, tmp_path: Path
) -> None:
    survive_kills(served, local, osdf, tmp_path, random.Random(1), 20)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_two_hundred_kills_cost_no_sample(
    served: Served, local: Path, osdf: ModuleType, tmp_path: Path, seed: int
) -> None:
    survive_kills(served, local, osdf, tmp_path, random.Random(100 + seed), 20)


@pytest.mark.parametrize("wrong", ["labels", "offsets"])
def test_a_wrong_index_ends_the_run_with_3(served: Served, tmp_path: Path, wrong: str) -> None:
    """Its checksums are right, and so are all bytes; its labels or offsets are not."""
    with np.load(served.folder / (TRAIN + INDEX_SUFFIX)) as file:
        arrays = {name: file[name] for name in file.files}
    if wrong == "labels":
        classes = arrays["classes"]
        arrays["classes"] = np.roll(classes.reshape(4, -1), 1, axis=0).reshape(classes.shape)
    else:
        arrays["offset"] = arrays["offset"] + 512
    with open(tmp_path / "foreign.index", "wb") as out:
        np.savez(out, **arrays)
    foreign = ["--index", str(tmp_path / "foreign.index"), "--skip-bad-images", "99"]
    job = start_run(f"osdf://{served.train_path}", served, tmp_path, *foreign)
    job.expect(BAD_DATA)
    assert "Traceback" not in job.log
    assert "index" in job.log.splitlines()[-1]
