"""The data plane over a network: batches and images that are read while their tar arrives."""

from __future__ import annotations

import gc
import json
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from dataset.archive.index import build_index
from dataset.archive.index_file import load_index_alone
from dataset.errors import PassingError, UserError
from dataset.own_names import STREAM, part_path
from dataset.stream.arrivals import ArrivalMap
from dataset.transfer.journal import CHUNK
from tests.dataset.dav_server import serving_tree
from tests.dataset.object_fetch import fetch
from tests.dataset.small_server import Handler
from tests.dataset.tars import TRAIN, VAL, nested_bytes
from tests.train import plain_loop
from tests.train import started_ranks as ranks
from tests.train.data.arriving import write_indexed
from tests.train.tar_server import answer, hold_back, serving_folder
from train.data.needs import HEADERS
from train.data.resumable import ResumableBatches
from train.data.sampler import epoch_order
from train.torch_data import CentreCrop, batches, open_images

pytestmark = pytest.mark.training

BATCH, SIZE = 8, 32
DECODE = CentreCrop(SIZE)
NUM_STEPS = 40 // plain_loop.BATCH * plain_loop.EPOCHS


@pytest.fixture(scope="module")
def served(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two tars and their indexes, as an origin would have them."""
    return write_indexed(images, tmp_path_factory.mktemp("served") / "tars")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where streams have their folders."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def open_batches(data: Path | str, **settings: Any) -> ResumableBatches:
    return batches(data, BATCH, **({"image_size": SIZE, "num_workers": 2} | settings))


def take(loop: Any) -> list[tuple[bytes, list[int]]]:
    return [(images.numpy().tobytes(), labels.tolist()) for images, labels in loop]


def find_map(data_dir: Path) -> ArrivalMap:
    folder = Path(json.loads((data_dir / STREAM).read_text())["folder"])
    return ArrivalMap(folder / "train.map")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, condition
        time.sleep(0.01)


def wait_for_end(pid: int) -> None:
    """Returns when a process is gone."""
    wait_until(lambda: not Path(f"/proc/{pid}").exists())


def list_left(folder: Path) -> list[Path]:
    return list(folder.glob("trainyard-stream-*"))


# --- the same images --------------------------------------------------------------------------


def test_streamed_batches_are_those_of_the_local_tar(
    served: Path, tmp_path: Path, small_units: None
) -> None:
    local = open_batches(served / TRAIN, order="streamed")
    with serving_folder(served) as (url, _):
        with open_batches(f"{url}/{TRAIN}", data_dir=tmp_path / "data", stream="always") as loader:
            first = take(loader)
            assert first == take(local)
            assert take(loader) == take(local)
            state = loader.state_dict()
            wait_until((tmp_path / "data" / TRAIN).exists)
    assert list_left(tmp_path) == []
    # All is here: no server is asked, and a state goes on in its order.
    again = open_batches(f"{url}/{TRAIN}", data_dir=tmp_path / "data")
    assert again.state_dict()["identity"]["order"] == "uniform"
    again.load_state_dict(state)
    assert take(again) == take(local) != first


def test_images_are_read_by_workers_while_they_arrive(served: Path, tmp_path: Path) -> None:
    """In a spawned worker, to which the images are pickled, and in forked ones."""
    here, is_open = open_images(served / TRAIN, decode=DECODE), Event()
    with serving_folder(served, hold_back(4, is_open)) as (url, _):
        there = open_images(f"{url}/{TRAIN}", decode=DECODE, data_dir=tmp_path)
        one: Any = {"sampler": [0], "num_workers": 1, "multiprocessing_context": "spawn"}
        try:
            ((image,), _), *others = DataLoader(there, **one)
            assert torch.equal(image, here[0][0]) and others == []
            assert not find_map(tmp_path).here.all()
        finally:
            is_open.set()
        loader = DataLoader(there, 5, num_workers=2, multiprocessing_context="fork")
        found = [image for images, _ in loader for image in images]
    assert torch.equal(torch.stack(found), torch.stack([here[n][0] for n in range(len(here))]))
    assert there.targets == here.targets and there.samples[3][1] == here.samples[3][1]
    there.close()


def test_both_splits_of_a_folder_come_by_one_fetcher(served: Path, tmp_path: Path) -> None:
    files = {f"/ns/{path.name}": path.read_bytes() for path in served.iterdir()}
    with serving_tree(files) as (root, _):
        val = open_images(f"{root}/ns/", "val", decode=DECODE, data_dir=tmp_path / "data")
        loader = open_batches(f"{root}/ns/", data_dir=tmp_path / "data", stream="always")
        local = open_images(served, "val", decode=DECODE)
        assert val.targets == local.targets and torch.equal(val[-1][0], local[-1][0])
        assert take(loader) == take(open_batches(served, order="streamed"))
        assert len(list_left(tmp_path)) == 1
        val.close()
        assert len(list_left(tmp_path)) == 1
        loader.close()
    assert list_left(tmp_path) == []


def name_otherwise(served: Path, folder: Path) -> Path:
    """The two tars and their indexes under other names, which say nothing of ILSVRC."""
    folder.mkdir()
    for old, new in ((TRAIN, "birds.tar"), (VAL, "birds_val.tar")):
        for suffix in ("", ".index"):
            shutil.copy(served / (old + suffix), folder / (new + suffix))
    return folder


@pytest.mark.parametrize("stream", ["always", "never"])
def test_two_urls_are_the_two_splits_in_either_order(
    served: Path, tmp_path: Path, stream: Any
) -> None:
    own = name_otherwise(served, tmp_path / "own")
    local = {split: open_images(served, split, decode=DECODE) for split in ("train", "val")}
    where: dict[str, Any] = {"data_dir": tmp_path / "data", "stream": stream}
    with serving_folder(own) as (url, _):
        train_url, val_url = f"{url}/birds.tar", f"{url}/birds_val.tar"
        val = open_images(f"{val_url},{train_url}", "val", decode=DECODE, **where)
        loader = open_batches(f"{train_url},{val_url}", **where)
        assert val.targets == local["val"].targets != local["train"].targets
        assert torch.equal(val[-1][0], local["val"][-1][0])
        assert take(loader) == take(
            open_batches(served, order=loader.state_dict()["identity"]["order"])
        )
        assert len(list_left(tmp_path)) == (stream == "always")  # one fetcher for both
        val.close()
        loader.close()
        if stream == "never":  # all is here: the next start finds it without a question
            assert open_images(f"{train_url},{val_url}", "val", **where).targets == val.targets
    assert list_left(tmp_path) == []


def test_two_urls_of_one_split_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.tar, b\.tar: give one URL, or those of") as told:
        open_images("http://localhost:1/a.tar,http://localhost:1/b.tar", data_dir=tmp_path)
    assert "\n" not in str(told.value)


# --- its end ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "forgotten"])
def test_the_fetcher_ends_with_its_reader(served: Path, tmp_path: Path, how: str) -> None:
    is_open = Event()
    with serving_folder(served, hold_back(4, is_open)) as (url, _):
        images = open_images(f"{url}/{TRAIN}", decode=DECODE, data_dir=tmp_path)
        assert images[0][1] == 0
        pid = find_map(tmp_path).pid
        if how == "close":
            images.close()
            with pytest.raises(PassingError, match="ended or closed it"):
                images[-1]
        del images
        gc.collect()
        wait_for_end(pid)
        is_open.set()
    assert list_left(tmp_path) == [] and part_path(tmp_path / TRAIN).exists()


def test_a_fetch_that_is_given_up_is_the_error_of_the_loop(
    served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_down = Event()

    def misbehave(handler: Handler) -> bool:
        return is_down.is_set() and handler.path == f"/{TRAIN}" and answer(handler, 503)

    with serving_folder(served, misbehave) as (url, _):
        with monkeypatch.context() as patch:
            patch.setattr("train.stream.loop_stream.GIVE_UP_S", 1.0)
            loader = open_batches(f"{url}/{TRAIN}", data_dir=tmp_path)
            is_down.set()
            with pytest.raises(PassingError, match="503"):
                take(loader)
        is_down.clear()
        again = open_batches(f"{url}/{TRAIN}", data_dir=tmp_path)  # not the one that has failed
        assert len(take(again)) == 5
    again.close()


# --- what cannot be streamed ------------------------------------------------------------------


def test_a_url_without_an_index_is_fetched_whole_or_refused(
    served: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bare = shutil.copytree(served, tmp_path / "bare", ignore=shutil.ignore_patterns("*.index"))
    caplog.set_level("INFO", "trainyard")
    with serving_folder(bare) as (url, _):
        make = "to stream it, run: python scripts/index_tar.py --checksums"
        command = f"{make} --index-dir {tmp_path / 'a'} {url}/{TRAIN}"
        with pytest.raises(UserError, match="stream='always': it cannot be streamed") as raised:
            open_batches(f"{url}/{TRAIN}", data_dir=tmp_path / "a", stream="always")
        assert command in str(raised.value) and "\n" not in str(raised.value)
        assert len(take(open_batches(f"{url}/{TRAIN}", data_dir=tmp_path / "a"))) == 5
        assert command in caplog.text and "not streamed but fetched whole first" in caplog.text
        given = served / (TRAIN + ".index")
        where = {"data_dir": tmp_path / "b", "index": given, "stream": "always"}
        with open_batches(f"{url}/{TRAIN}", **where) as loader:
            assert len(take(loader)) == 5
        with pytest.raises(UserError, match="stream 'maybe' is none of"):
            open_batches(f"{url}/{TRAIN}", data_dir=tmp_path / "a", stream="maybe")


def test_ranks_of_several_nodes_fetch_whole(
    served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (variables | {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)
    with serving_folder(served) as (url, _), pytest.raises(UserError, match="on 2 nodes"):
        open_batches(f"{url}/{TRAIN}", data_dir=tmp_path, stream="always")


# --- kills ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def distinct(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tar of 40 classes of one image each, so that a label tells which sample it is."""
    noise = np.random.default_rng(0)
    files = sorted((images / "train").glob("*/*"))[:40]
    tree = {
        f"c{n:02d}": {file.name: file.read_bytes() + noise.bytes(150_000)}
        for n, file in enumerate(files)
    }
    folder = tmp_path_factory.mktemp("distinct")
    (folder / TRAIN).write_bytes(nested_bytes(tree))
    build_index(folder / TRAIN, checksums=True)
    return folder


def find_late_chunk(index: Path, num_samples: int) -> int:
    """A MiB that none of the first samples of the run lies in."""
    found = load_index_alone(index)
    first = epoch_order(0, 0, 40)[:num_samples]
    begins, ends = found.offset[first] - HEADERS, (found.offset + found.size)[first]
    used = {
        chunk
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)
        for chunk in range(begin // CHUNK, (end - 1) // CHUNK + 1)
    }
    return next(chunk for chunk in range(found.tar_size // CHUNK) if chunk not in used)


def test_a_streamed_loop_that_is_killed_loses_and_repeats_no_sample(
    distinct: Path, tmp_path: Path
) -> None:
    """Kill -9 while the tar arrives and later, on one rank and on two that share a stream."""
    late, is_open = find_late_chunk(distinct / (TRAIN + ".index"), BATCH), Event()
    data = tmp_path / "data"
    with serving_folder(distinct, hold_back(late, is_open, late + 1)) as (url, _):
        start = partial(start_loop, f"{url}/{TRAIN}", tmp_path)
        try:
            assert start(1, "before").wait() == [-signal.SIGKILL]
            arrivals = find_map(data)
            assert arrivals.here.any() and not arrivals.here.all()
            wait_for_end(arrivals.pid)
        finally:
            is_open.set()
        for kill_at, when, world in [(2, "after", 2), (7, "before", 2)]:
            job = start(kill_at, when, world)
            assert -signal.SIGKILL in job.wait(), job.log
        start(NUM_STEPS + 1, "never").expect(0)
        fetch(f"{url}/{TRAIN}", data)  # finishes what the loops may have left
    seen = torch.load(tmp_path / "last.pt")["seen"]
    assert seen == [int(index) for epoch in (0, 1) for index in epoch_order(0, epoch, 40)]
    assert not arrivals.path.parent.exists()  # removed by the next start
    assert (data / TRAIN).read_bytes() == (distinct / TRAIN).read_bytes()


def start_loop(url: str, folder: Path, kill_at: int, when: str, world: int = 1) -> ranks.Job:
    function = partial(plain_loop.train, url, folder, kill_at, when)
    return ranks.call(function, folder / "log", world)
