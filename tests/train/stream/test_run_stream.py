"""Runs that stream their tars from a server: the same training, whatever is killed or refused."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from dataset.archive.index_file import load_index_alone
from dataset.errors import BAD_DATA, CHECKPOINTED, DONE, TRY_AGAIN, USER_MISTAKE
from dataset.own_names import part_path
from dataset.stream.arrivals import ArrivalMap
from dataset.transfer.journal import CHUNK
from tests.dataset.object_fetch import fetch
from tests.dataset.small_server import Handler
from tests.dataset.tars import TRAIN, VAL
from tests.train import hooks
from tests.train import started_ranks as ranks
from tests.train.data.arriving import write_indexed
from tests.train.outcomes import (
    EVERY_STEP,
    final_state,
    find_differences,
    read_trace,
    stopped_at,
    strip_times,
)
from tests.train.tar_server import Misbehave, answer, first_byte, hold_back, serving_folder
from train.data.needs import HEADERS
from train.data.sampler import epoch_order
from train.records.record import read_epochs, read_run

pytestmark = pytest.mark.training

TWO_EPOCHS = ["--epochs", "2", "--microbatch", "4"]
INDEX = ".index"


@pytest.fixture(scope="module")
def served(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two tars and their indexes, as an origin would have them."""
    return write_indexed(images, tmp_path_factory.mktemp("served") / "tars")


@pytest.fixture(scope="module")
def local(served: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run from the local tars, in the streamed order: its folder, with a trace."""
    out = tmp_path_factory.mktemp("local")
    hook = partial(prepare_rank, out, hooks.use_small_units)
    argv = [str(served), *TWO_EPOCHS, "--order", "streamed", "--output", str(out / "run")]
    ranks.run(argv, out / "log", hook=hook).expect(DONE)
    return out


def prepare_rank(folder: Path, *more: ranks.Hook) -> None:
    """A rank with a trace of its samples in the folder, and its temporary files too."""
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None  # it was read before the rank was forked
    hooks.trace_samples(folder / "trace")
    hooks.all_of(*more)


def start_run(
    urls: str, folder: Path, *flags: str, hook: ranks.Hook | None = None, num_ranks: int = 1
) -> ranks.Job:
    """A run of which the data, records, trace and log lie in a folder."""
    folder.mkdir(exist_ok=True)
    more = (hook,) if hook else ()
    argv = [urls, *TWO_EPOCHS, "--data-dir", str(folder / "data"), "--output", str(folder / "run")]
    hook = partial(prepare_rank, folder, hooks.use_small_units, *more)
    return ranks.start([*argv, *flags], folder / "log", num_ranks, hook=hook)


def name_urls(url: str) -> str:
    return f"{url}/{TRAIN},{url}/{VAL}"


def stream_of(folder: Path, attempt: int = -1) -> dict[str, Any]:
    found: dict[str, Any] = read_run(folder / "run")["attempts"][attempt]["stream"]
    return found


def check_same_run(folder: Path, local: Path, served: Path) -> None:
    """Sample ids, weights and records are those of the local run; the tars are whole."""
    assert read_trace(folder / "trace") == read_trace(local / "trace")
    assert find_differences(final_state(folder / "run"), final_state(local / "run")) == []
    epochs = [strip_times(read_epochs(out / "run")) for out in (folder, local)]
    assert epochs[0] == epochs[1]
    for name in (TRAIN, VAL):
        assert (folder / "data" / name).read_bytes() == (served / name).read_bytes()
    assert list(folder.glob("trainyard-stream-*")) == []


# --- the same training ------------------------------------------------------------------------


def test_a_streamed_run_is_the_local_run(local: Path, served: Path, tmp_path: Path) -> None:
    is_open = Event()
    with serving_folder(served, hold_back(1, is_open)) as (url, _):
        job = start_run(name_urls(url), tmp_path)
        try:
            job.wait_for(lambda: (found := find_map(tmp_path)) and found.num_waiting, "a reader")
        finally:
            is_open.set()
        job.expect(DONE)
    check_same_run(tmp_path, local, served)
    assert f"streams {name_urls(url)} to {tmp_path / 'data'}" in job.log
    stream, size = stream_of(tmp_path), sum((served / name).stat().st_size for name in (TRAIN, VAL))
    twice = stream["bytes_twice"]
    assert size <= stream["bytes_fetched"] <= 1.02 * size + twice["hedged"]
    assert sum(twice.values()) == twice["hedged"] and stream["bytes_resumed"] == 0
    assert stream["hits"] + stream["misses"] == 2 * (40 + 35) and stream["misses"] > 0
    assert stream["index"] == "unproven" and stream["fetcher_restarts"] == 0
    assert stream["is_whole"]
    (attempt,) = read_run(tmp_path / "run")["attempts"]
    assert 0 < attempt["time_to_first_step_s"] < attempt["seconds"]
    wait = attempt["phases"]["data_wait"]
    assert 0 < wait["network_s"] <= wait["mean_s"]
    first, second = read_epochs(tmp_path / "run")
    assert first["data_wait_network_s"] > 0 == second["data_wait_network_s"]
    both = first["data_wait_network_s"] + first["data_wait_decode_s"]
    assert both == pytest.approx(first["data_wait_s"])

    # All is here: nothing is asked of the server, which is gone, and a fresh run is uniform.
    again = start_run(name_urls(url), tmp_path, "--output", str(tmp_path / "again")).expect(DONE)
    assert "streams" not in again.log.replace(job.log, "")
    assert read_run(tmp_path / "again")["config"]["order"] == "uniform"


def test_two_ranks_read_one_stream(local: Path, served: Path, tmp_path: Path) -> None:
    with serving_folder(served) as (url, _):
        start_run(name_urls(url), tmp_path, "-j", "1", num_ranks=2).expect(DONE)
    assert read_trace(tmp_path / "trace") == read_trace(local / "trace")
    assert stream_of(tmp_path)["hits"] + stream_of(tmp_path)["misses"] == 2 * (40 + 35)


def test_a_val_tar_beside_the_stream_validates_and_the_run_goes_on_when_all_is_here(
    served: Path, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    for name in (VAL, VAL + INDEX):
        shutil.copy2(served / name, tmp_path / "data" / name)
    kill = partial(hooks.at_step, 0, 4, partial(hooks.wait_and_kill, tmp_path / "run", 3))
    with serving_folder(served) as (url, _):
        job = start_run(f"{url}/{TRAIN}", tmp_path, *EVERY_STEP, hook=kill)
        assert job.wait() == [-signal.SIGKILL]
        fetch(f"{url}/{TRAIN}", tmp_path / "data")  # finishes what the stream began
    start_run(f"{url}/{TRAIN}", tmp_path).expect(DONE)
    assert [epoch["val_acc1"] is not None for epoch in read_epochs(tmp_path / "run")] == [True] * 2


# --- kills ------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["data", "elsewhere", "local"])
def test_a_killed_rank_goes_on(local: Path, served: Path, tmp_path: Path, where: str) -> None:
    """In the folder of its partial file, in a new sandbox, and from the local tar."""
    kill = partial(hooks.at_step, 0, 4, partial(hooks.wait_and_kill, tmp_path / "run", 3))
    with serving_folder(served) as (url, _):
        job = start_run(name_urls(url), tmp_path, *EVERY_STEP, hook=kill)
        assert job.wait() == [-signal.SIGKILL]
        if where == "elsewhere":
            (tmp_path / "data").rename(tmp_path / "left behind")
        data = str(served) if where == "local" else name_urls(url)
        job = start_run(data, tmp_path).expect(DONE)
    assert re.search("continuing from step [34] of 10", job.log)
    for name in (TRAIN, VAL) if where == "local" else ():
        shutil.copy(served / name, tmp_path / "data" / name)
    for left in tmp_path.glob("trainyard-stream-*"):  # by the kill
        shutil.rmtree(left)
    check_same_run(tmp_path, local, served)


def test_a_vacated_run_begins_its_next_sandbox_with_what_its_next_step_needs(
    served: Path, tmp_path: Path
) -> None:
    """All other bytes of the training tar are held back, those before them too."""
    index, is_open = served / (TRAIN + INDEX), Event()
    stops = (1, 2, 3)  # after SIGTERM at the samples of step 1
    seed = next(s for s in range(1000) if all(has_gap(index, s, step) for step in stops))
    flags = ["--order", "uniform", "--seed", str(seed)]
    stop = partial(hooks.at_step, 0, 1, hooks.terminate_myself)
    with serving_folder(served) as (url, _):
        start_run(name_urls(url), tmp_path, *flags, hook=stop).expect(CHECKPOINTED)
    step = stopped_at(tmp_path / "run")
    assert step in stops
    (tmp_path / "data").rename(tmp_path / "left behind")
    needed = find_needed(index, seed, step)
    with serving_folder(served, hold_others(needed, is_open)) as (url, _):
        job = start_run(name_urls(url), tmp_path, *flags)
        try:
            job.wait_for_log(f" step {step + 1}/10 ")
            found = find_map(tmp_path)
            assert found is not None
            assert needed.issuperset(np.flatnonzero(found.here).tolist())
        finally:
            is_open.set()
        job.expect(DONE)
    assert sorted(read_trace(tmp_path / "trace")) == list(range(10))


def find_needed(index: Path, seed: int, step: int) -> set[int]:
    """The MiB of the training tar that a step of the first epoch needs, in uniform order."""
    found, samples = load_index_alone(index), epoch_order(seed, 0, 42)[8 * step : 8 * step + 8]
    firsts = (found.offset[samples] - HEADERS) // CHUNK
    lasts = (found.offset[samples] + found.size[samples] - 1) // CHUNK
    pairs = zip(firsts.tolist(), lasts.tolist(), strict=True)
    return {chunk for first, last in pairs for chunk in range(max(0, first), last + 1)}


def has_gap(index: Path, seed: int, step: int) -> bool:
    """Whether a step does not need some MiB that lies before one that it needs."""
    needed = find_needed(index, seed, step)
    return len(needed) <= max(needed)


def hold_others(needed: set[int], is_open: Event) -> Misbehave:
    """All of the training tar but these MiB comes only when the gate is open."""

    def misbehave(handler: Handler) -> bool:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", ""))
        if handler.path == f"/{TRAIN}" and asked and asked[1] != asked[2]:  # not for the size
            chunks = range(int(asked[1]) // CHUNK, int(asked[2]) // CHUNK + 1)
            if not needed.issuperset(chunks):
                is_open.wait()
        return False

    return misbehave


def test_a_run_that_validates_first_gets_the_validation_images_first(
    local: Path, served: Path, tmp_path: Path
) -> None:
    """In a new sandbox: the training tar is held back until the epoch is on record."""
    stop, is_open = partial(hooks.at_step, 0, 4, hooks.terminate_myself), Event()
    with serving_folder(served) as (url, _):
        start_run(name_urls(url), tmp_path, hook=stop).expect(CHECKPOINTED)
    assert stopped_at(tmp_path / "run") == 5 and read_epochs(tmp_path / "run") == []
    (tmp_path / "data").rename(tmp_path / "left behind")
    with serving_folder(served, hold_back(1, is_open)) as (url, _):
        job = start_run(name_urls(url), tmp_path)
        try:
            job.wait_for(lambda: read_epochs(tmp_path / "run"), "the validation")
        finally:
            is_open.set()
        job.expect(DONE)
    check_same_run(tmp_path, local, served)


def find_map(folder: Path) -> ArrivalMap | None:
    """The map of a run under way, once its fetcher is heard of."""
    for path in folder.glob("trainyard-stream-*/train.map"):
        arrivals = ArrivalMap(path)
        if arrivals.pid:
            return arrivals
    return None


def test_a_killed_fetcher_is_started_again(local: Path, served: Path, tmp_path: Path) -> None:
    is_open = Event()
    with serving_folder(served, hold_back(4, is_open)) as (url, _):
        job = start_run(name_urls(url), tmp_path)
        try:
            job.wait_for(lambda: (found := find_map(tmp_path)) and found.here.any(), "a chunk")
            found = find_map(tmp_path)
            assert found is not None
            os.kill(found.pid, signal.SIGKILL)
        finally:
            is_open.set()
        job.expect(DONE)
    check_same_run(tmp_path, local, served)
    assert stream_of(tmp_path)["fetcher_restarts"] == 1


# --- what does not come -----------------------------------------------------------------------


def find_seed(index: Path, chunk: int) -> tuple[int, int]:
    """A seed with which a chunk is first used after the first step, and the step."""
    found = load_index_alone(index)
    in_chunk = (found.offset + found.size > chunk * CHUNK) & (
        found.offset - 512 < (chunk + 1) * CHUNK
    )
    for seed in range(1000):
        places = np.flatnonzero(in_chunk[epoch_order(seed, 0, 42)])
        if 8 <= places[0] < 40:
            return seed, int(places[0]) // 8
    raise AssertionError("no seed")


def refuse_end(chunk: int, status: int) -> Misbehave:
    """The last MiB of the training tar are refused, from one on; a transfer that runs into them
    breaks off there."""

    def misbehave(handler: Handler) -> bool:
        begin = first_byte(handler)
        if handler.path != f"/{TRAIN}" or begin < chunk * CHUNK:
            return False
        return answer(handler, status)

    return misbehave


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_that_starves_is_saved_once_and_then_to_be_tried_again(
    served: Path, tmp_path: Path, num_ranks: int
) -> None:
    last = (served / TRAIN).stat().st_size // CHUNK
    seed, step = find_seed(served / (TRAIN + INDEX), last)
    flags = ["--order", "uniform", "--seed", str(seed), "--give-up-after", "5"]
    with serving_folder(served, refuse_end(last, 503)) as (url, _):
        if num_ranks == 1:
            job = start_run(name_urls(url), tmp_path, *flags).expect(CHECKPOINTED)
            assert stopped_at(tmp_path / "run") == step
            assert re.search(rf" step {step}/10 .*, 0 steps ahead$", job.log, re.MULTILINE)
        job = start_run(name_urls(url), tmp_path, *flags, num_ranks=num_ranks).expect(TRY_AGAIN)
    assert "Traceback" not in job.log and list(tmp_path.glob("trainyard-stream-*")) == []
    assert part_path(tmp_path / "data" / TRAIN).exists()
    with serving_folder(served) as (url, _):
        start_run(name_urls(url), tmp_path, *flags).expect(DONE)
    assert sorted(read_trace(tmp_path / "trace")) == list(range(10))


def test_permuted_labels_end_the_run_with_3(served: Path, tmp_path: Path) -> None:
    """All bytes are right by the sums of the index, and the labels are not."""
    folder = shutil.copytree(served, tmp_path / "foreign")
    place = folder / (TRAIN + INDEX)
    with np.load(place) as file:
        arrays = {name: file[name] for name in file.files}
    arrays["classes"] = np.roll(arrays["classes"].reshape(7, -1), 1, axis=0).ravel()
    with open(place, "wb") as out:
        np.savez(out, **arrays)
    with serving_folder(folder) as (url, _):
        job = start_run(f"{url}/{TRAIN}", tmp_path / "a", "--skip-bad-images", "99")
        job.expect(BAD_DATA)
    assert "the index of" in job.log and "is wrong" in job.log and "Traceback" not in job.log


# --- what cannot be streamed ------------------------------------------------------------------


@pytest.mark.parametrize("stream", ["auto", "always", "never"])
def test_a_tar_without_an_index_is_fetched_whole_with_the_command_that_avoids_it(
    served: Path, tmp_path: Path, stream: str
) -> None:
    folder = shutil.copytree(served, tmp_path / "bare", ignore=shutil.ignore_patterns("*.index"))
    with serving_folder(folder) as (url, _):
        flags = ["--stream", stream, "--max-steps", "1"]
        job = start_run(f"{url}/{TRAIN}", tmp_path / "a", *flags)
        job.expect(USER_MISTAKE if stream == "always" else DONE)
    where = f"--index-dir {tmp_path / 'a' / 'data'} {url}/{TRAIN}"
    command = f"python scripts/index_tar.py --checksums {where}"
    assert (command in job.log) == (stream != "never") and "Traceback" not in job.log
    if stream != "always":
        assert (tmp_path / "a" / "data" / TRAIN).exists()
        assert "stream" not in read_run(tmp_path / "a" / "run")["attempts"][0]


def test_a_short_run_proves_its_classes_and_leaves_the_partial_file(
    served: Path, tmp_path: Path
) -> None:
    """Validation has no index: it comes whole first. --index names that of training."""
    folder = shutil.copytree(served, tmp_path / "bare", ignore=shutil.ignore_patterns("*.index"))
    last, is_open = (served / TRAIN).stat().st_size // CHUNK, Event()
    shutil.copy(served / (TRAIN + INDEX), tmp_path / "given.index")
    seed, _ = find_seed(tmp_path / "given.index", last)
    flags = ["--max-steps", "1", "--seed", str(seed), "--order", "uniform"]
    try:
        with serving_folder(folder, hold_back(last, is_open)) as (url, _):
            given = ["--index", str(tmp_path / "given.index"), "--stream", "always"]
            start_run(name_urls(url), tmp_path / "a", *flags, *given).expect(DONE)
            is_open.set()
    finally:
        is_open.set()
    data = tmp_path / "a" / "data"
    assert part_path(data / TRAIN).exists() and not (data / TRAIN).exists()
    assert not stream_of(tmp_path / "a")["is_whole"]
    assert len(read_epochs(tmp_path / "a" / "run")) == 1  # validated
