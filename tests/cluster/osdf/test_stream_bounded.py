"""A training that streams from real XRootD caches with 15 % of the disk is the local run."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from types import ModuleType

import pytest

from dataset.errors import DONE
from dataset.own_names import units_path
from tests.cluster.osdf.streamed_runs import Served, forget_maps, start_run
from tests.dataset.tars import TRAIN
from tests.train import hooks
from tests.train import started_ranks as ranks
from tests.train.cache_sizes import find_map, sampling
from tests.train.outcomes import EVERY_STEP, final_state, find_differences, read_trace
from train.records.record import STAGES_FILE, read_lines, read_run

pytestmark = [
    pytest.mark.osdf,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("no_leftovers"),
]
SHARE = 0.15  # of the training tar, for it and the validation images
KILLS = ("rank", "fetcher", "both", "rank")


def size_of(served: Served) -> int:
    return (served.folder / TRAIN).stat().st_size


def limit_of(served: Served) -> int:
    return int(SHARE * size_of(served))


def start_bounded(
    served: Served, folder: Path, *flags: str, hook: ranks.Hook | None = None
) -> ranks.Job:
    limit = ["--cache-limit", f"{limit_of(served)}"]
    return start_run(served.urls, served, folder, *limit, *flags, hook=hook)


def check_same_run(folder: Path, local: Path) -> None:
    """Sample ids and weights are those of the local run."""
    assert read_trace(folder / "trace") == read_trace(local / "trace")
    assert find_differences(final_state(folder / "run"), final_state(local / "run")) == []
    assert list(folder.glob("trainyard-stream-*")) == []


def test_a_run_with_15_percent_of_the_disk_is_the_local_run(
    served: Served, local: Path, osdf: ModuleType, tmp_path: Path
) -> None:
    osdf.forget_traffic(served.train_path)
    with sampling(tmp_path / "data") as sizes:
        job = start_bounded(served, tmp_path, hook=hooks.use_few_connections).expect(DONE)
    check_same_run(tmp_path, local)
    assert 0.05 * size_of(served) < max(sizes) <= limit_of(served)
    (attempt,) = read_run(tmp_path / "run")["attempts"]
    stream = attempt["stream"]
    assert stream["cache_limit"] == limit_of(served) >= stream["cache_least"]
    assert stream["bytes_replaced"] == stream["bytes_resumed"] == stream["fetcher_restarts"] == 0
    assert "kept for good" in job.log

    # Epoch 2 fetches what is not kept; before its end, nothing may be on its way to a third.
    stages = read_lines(tmp_path / "run" / STAGES_FILE)
    (first,) = [s for s in stages if s["stage"] == "train" and s["epoch"] == 0]
    traffic = osdf.traffic(served.train_path)
    end_s = first["start"] + first["seconds"]
    later = sum(entry["bytes"] for entry in traffic if entry["started_s"] > end_s)
    kept, twice = stream["cache_kept"], sum(stream["bytes_twice"].values())
    assert kept > limit_of(served) / 2
    working = limit_of(served) - kept  # may have come ahead, or be left over
    expected = size_of(served) - kept
    assert expected - working <= later <= expected + working + twice
    # What comes ahead of epoch 2 hides there what is not kept, but not in the sum of both epochs.
    # Half of it is spared for hedges: what was sent to a connection that is cut may not arrive.
    both = osdf.sent_bytes(served.train_path)
    assert both <= 2 * size_of(served) - kept / 2 + twice


def survive_kills(served: Served, local: Path, osdf: ModuleType, folder: Path, seed: int) -> None:
    """A run that is killed again and again, at random moments, and then ends as the local one.

    The two epochs fetch nearly twice the tar. All kills come within 4/3 of it.
    """
    chance = random.Random(seed)
    with sampling(folder / "data") as sizes:
        with osdf.wan(path=served.train_path, delay_s=0.01, bytes_per_s=1e6):
            for what in KILLS:
                job = start_bounded(served, folder, *EVERY_STEP)
                kill_later(job, folder, what, chance.randrange(size_of(served) // 3))
        start_bounded(served, folder, *EVERY_STEP).expect(DONE)
    check_same_run(folder, local)
    assert max(sizes) <= limit_of(served)


def test_kills_of_rank_and_fetcher_cost_no_sample_and_no_disk(
    served: Served, local: Path, osdf: ModuleType, tmp_path: Path
) -> None:
    survive_kills(served, local, osdf, tmp_path, 1)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_eighty_kills_cost_no_sample_and_no_disk(
    served: Served, local: Path, osdf: ModuleType, tmp_path: Path, seed: int
) -> None:
    survive_kills(served, local, osdf, tmp_path, 100 + seed)


def kill_later(job: ranks.Job, folder: Path, what: str, num_bytes: int) -> None:
    """Kills the rank, its fetcher or both when so many bytes have come."""
    await_bytes(job, folder, num_bytes)
    found = find_map(folder)
    assert found is not None
    pid, fetched = found.pid, found.tally.fetched
    if what != "rank":
        os.kill(pid, signal.SIGKILL)
    if what == "fetcher":  # the training goes on with the next one
        job.wait_for(lambda: found.pid != pid and found.tally.fetched > fetched, "the next fetcher")
    job.send(signal.SIGKILL)
    assert job.wait() == [-signal.SIGKILL]
    forget_maps(folder)


def await_bytes(job: ranks.Job, folder: Path, num_bytes: int) -> None:
    """Waits until a run has fetched so much."""

    def has_come() -> bool:
        found = find_map(folder)
        return found is not None and found.tally.fetched >= num_bytes

    job.wait_for(has_come, f"{num_bytes} bytes")


def test_files_that_are_damaged_under_the_run_are_fetched_again(
    served: Served, local: Path, osdf: ModuleType, tmp_path: Path
) -> None:
    """All files of the cache are truncated, flipped or removed, while the run goes on."""
    with osdf.wan(path=served.train_path, delay_s=0.01, bytes_per_s=1e6):
        job = start_bounded(served, tmp_path)
        for quarters in range(1, 4):
            await_bytes(job, tmp_path, quarters * size_of(served) // 4)
            damage_all(units_path(tmp_path / "data" / TRAIN))
        job.expect(DONE)
    check_same_run(tmp_path, local)
    (attempt,) = read_run(tmp_path / "run")["attempts"]
    assert attempt["stream"]["bytes_replaced"] > 0


def damage_all(folder: Path) -> None:
    for number, file in enumerate(sorted(folder.glob("*[0-9]"))):
        try:
            if number % 3 == 0:
                os.truncate(file, 1000)
            elif number % 3 == 1:
                with open(file, "r+b") as opened:
                    opened.seek(40_000)
                    opened.write(b"flipped")
            else:
                file.unlink()
        except FileNotFoundError:
            continue  # freed meanwhile
