"""Runs that stream with little disk: the same training, and never more bytes than the limit."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dataset.archive import units
from dataset.archive.index import build_index
from dataset.errors import DONE, USER_MISTAKE, UserError
from dataset.own_names import part_path, units_path
from tests.dataset.tars import TRAIN, VAL, drop_unit_sums
from tests.train import hooks
from tests.train import started_ranks as ranks
from tests.train.cache_sizes import find_map, sampling
from tests.train.data.arriving import write_padded
from tests.train.outcomes import EVERY_STEP, final_state, find_differences, read_trace
from tests.train.tar_server import serving_folder
from train.data.bounded_cache import SPARE_BYTES, check_limit, lower_to_disk
from train.data.unit_needs import CacheShare
from train.records.record import read_run

pytestmark = pytest.mark.training

TWO_EPOCHS = ["--epochs", "2", "--microbatch", "4"]
UNIT = 300_000  # two images: 21 units
IN_USE = 4_000_000  # of 6.5 MB; validation is not streamed here


@pytest.fixture(scope="module")
def served(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The training tar and its index, which has sums of small units."""
    folder = write_padded(images, tmp_path_factory.mktemp("served") / "tars")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units, "UNIT_SIZE", UNIT)
        build_index(folder / TRAIN, checksums=True)
    (folder / VAL).unlink()
    return folder


@pytest.fixture(scope="module")
def local(served: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run from the local tar, in the streamed order."""
    folder = tmp_path_factory.mktemp("local")
    start_run(str(served / TRAIN), folder, "--order", "streamed").expect(DONE)
    return folder


def use_units(folder: Path) -> None:
    """Units of two images, and none beside those in use: the limit is as tight as can be."""
    tempfile.tempdir = str(folder)
    hooks.trace_samples(folder / "trace")
    hooks.use_small_units()
    hooks.set_value("train.data.tar_layout", "UNIT_SIZE", UNIT)
    hooks.set_value("train.data.unit_needs", "UNITS_A_CONNECTION", 0)


def start_run(
    data: str, folder: Path, *flags: str, hook: ranks.Hook | None = None, num_ranks: int = 1
) -> ranks.Job:
    argv = [data, *TWO_EPOCHS, "--output", str(folder / "run"), *flags]
    if "://" in data:
        argv += ["--data-dir", str(folder / "data")]
    hook = partial(hooks.all_of, partial(use_units, folder), *([hook] if hook else []))
    return ranks.start(argv, folder / "log", num_ranks, hook=hook)


def start_bounded(url: str, folder: Path, *flags: str, **more: Any) -> ranks.Job:
    return start_run(f"{url}/{TRAIN}", folder, "--cache-limit", f"{IN_USE}", *flags, **more)


def stream_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_run(folder / "run")["attempts"][-1]["stream"]
    return found


def check_same_run(folder: Path, local: Path) -> None:
    assert read_trace(folder / "trace") == read_trace(local / "trace")
    assert find_differences(final_state(folder / "run"), final_state(local / "run")) == []


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_with_little_disk_is_the_local_run(
    served: Path, local: Path, tmp_path: Path, num_ranks: int
) -> None:
    flags = ["-j", "1"] if num_ranks == 2 else []
    with serving_folder(served) as (url, _), sampling(tmp_path / "data") as sizes:
        job = start_bounded(url, tmp_path, *flags, num_ranks=num_ranks).expect(DONE)
    check_same_run(tmp_path, local)
    assert 0 < max(sizes) <= IN_USE
    stream, size = stream_of(tmp_path), (served / TRAIN).stat().st_size
    assert stream["cache_limit"] == IN_USE and not stream["is_whole"]
    assert stream["bytes_fetched"] >= size - 20_000 and stream["bytes_refetched"] > 0
    assert stream["bytes_replaced"] == 0
    assert "cache limit 0.00 GB" in job.log and "kept for good" in job.log
    assert list(tmp_path.glob("trainyard-stream-*")) == []


def test_a_limit_that_is_too_small_is_refused_with_the_least(
    served: Path, local: Path, tmp_path: Path
) -> None:
    """The least limit is exact: with it, the run is the local run."""
    with serving_folder(served) as (url, _):
        job = start_run(f"{url}/{TRAIN}", tmp_path, "--cache-limit", "1MB").expect(USER_MISTAKE)
        found = re.search(r"give ([\d.]+GB) or more", job.log)
        assert found and "--cache-limit: 0.001 GB are too little" in job.log
        with sampling(tmp_path / "data") as sizes:
            least = ["--cache-limit", found[1]]
            start_run(f"{url}/{TRAIN}", tmp_path, *least).expect(DONE)
        again = start_run(f"{url}/{TRAIN}", tmp_path, *least).expect(DONE)
    assert "this run is done already" in again.log
    check_same_run(tmp_path, local)
    assert max(sizes) <= float(found[1][:-2]) * 1e9


def test_what_has_yet_to_come_of_the_validation_tar_is_no_room_for_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fetch makes its file as long as the object at once."""
    with open(part_path(tmp_path / VAL), "wb") as file:
        file.write(bytes(1 << 20))
        file.truncate(1 << 30)
    free = SPARE_BYTES + 1000
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    room = lower_to_disk(1 << 40, tmp_path / TRAIN, tmp_path / VAL)
    assert 1000 + (1 << 20) <= room < 1000 + (2 << 20)


def test_a_disk_that_is_too_small_is_told_what_is_missing() -> None:
    share = CacheShare(3_100_000_000, 0, 12_000_000_000, 299_500_001, 148_000_000_000, 10**11)
    with pytest.raises(UserError, match=r"free 9\.200 GB more, for 12\.300 GB in all") as raised:
        check_limit(share, is_given=False)
    assert str(raised.value).startswith("room on the disk: 3.100 GB are too little")


def test_a_limit_for_which_the_disk_has_no_room_is_not_to_blame(
    served: Path, tmp_path: Path
) -> None:
    full = partial(hooks.set_value, "train.data.bounded_cache", "lower_to_disk", leave_no_room)
    with serving_folder(served) as (url, _):
        job = start_bounded(url, tmp_path, hook=full).expect(USER_MISTAKE)
    assert "room on the disk: 0.001 GB are too little" in job.log


def leave_no_room(*_: object) -> int:
    return 1_000_000


def test_a_uniform_checkpoint_cannot_be_streamed_with_little_disk(
    served: Path, tmp_path: Path
) -> None:
    start_run(str(served / TRAIN), tmp_path, *EVERY_STEP, "--max-steps", "2").expect(DONE)
    with serving_folder(served) as (url, _):
        job = start_bounded(url, tmp_path).expect(USER_MISTAKE)
    assert "takes --order streamed" in job.log and "Traceback" not in job.log


def test_an_index_of_format_1_says_what_it_cannot_do(served: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(served, tmp_path / "older")
    drop_unit_sums(folder / f"{TRAIN}.index")
    with serving_folder(folder) as (url, _):
        job = start_bounded(url, tmp_path).expect(USER_MISTAKE)
    assert "has no checksums of units: it is of format 1" in job.log
    where = f"--index-dir {tmp_path / 'data'} {url}/{TRAIN}"
    assert f"run: python scripts/index_tar.py --checksums {where}" in job.log


def test_without_a_limit_the_units_give_way_to_the_whole_tar(
    served: Path, local: Path, tmp_path: Path
) -> None:
    with serving_folder(served) as (url, _):
        start_bounded(url, tmp_path, *EVERY_STEP, "--max-steps", "3").expect(DONE)
        assert list(units_path(tmp_path / "data" / TRAIN).iterdir())
        start_run(f"{url}/{TRAIN}", tmp_path).expect(DONE)
    check_same_run(tmp_path, local)
    left = sorted(file.name for file in (tmp_path / "data").iterdir())
    assert left == [".fetch.lock", TRAIN, f"{TRAIN}.index", "fetched.jsonl"]


@pytest.mark.parametrize("killed", ["rank", "fetcher"])
def test_a_killed_run_goes_on(served: Path, local: Path, tmp_path: Path, killed: str) -> None:
    kill = partial(hooks.at_step, 0, 4, partial(hooks.wait_and_kill, tmp_path / "run", 3))
    with serving_folder(served) as (url, _), sampling(tmp_path / "data") as sizes:
        if killed == "rank":
            job = start_bounded(url, tmp_path, *EVERY_STEP, hook=kill)
            assert job.wait() == [-signal.SIGKILL]
            start_bounded(url, tmp_path).expect(DONE)
        else:
            job = start_bounded(url, tmp_path)
            job.wait_for(lambda: (found := find_map(tmp_path)) and found.here.any(), "a unit")
            found = find_map(tmp_path)
            assert found is not None
            os.kill(found.pid, signal.SIGKILL)
            job.expect(DONE)
            assert stream_of(tmp_path)["fetcher_restarts"] <= 1  # it may have been the last unit
    check_same_run(tmp_path, local)
    assert max(sizes) <= IN_USE
