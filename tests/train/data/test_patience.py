"""Reads that never return: the file is named, and a run can be stopped, saved and continued."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from dataset.errors import CHECKPOINTED, DONE, DataError
from tests.train import hooks
from tests.train import started_ranks as ranks
from tests.train.data.small_batches import items_of, open_images
from tests.train.outcomes import final_state, find_differences, stopped_at
from train.data import patience
from train.data.batches import Batch, Images
from train.data.loader import load_batches
from train.data.patience import PatientBatches, Stranded
from train.data.sampler import epoch_order
from train.data.sources import FolderSource
from train.data.splits import open_dataset
from train.ranks.interrupt import Vote
from train.records.record import read_run

pytestmark = pytest.mark.training

CPU = torch.device("cpu")
LOADERS = [("pil", 0), ("pil", 2), ("kernel", 2)]  # in place, worker processes, threads


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[Path]:
    """A pipe that nobody writes to: opening it never returns, until the test is over."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    yield path
    os.close(os.open(path, os.O_RDWR))  # lets go of those that hang in this process


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "POLL_S", 0.01)
    monkeypatch.setattr(patience, "WARN_S", 0.1)
    monkeypatch.setattr(patience, "STOP_S", 0.1)


def hang_in(monkeypatch: pytest.MonkeyPatch, fifo: Path, index: int) -> None:
    plain = FolderSource.read

    def read(source: FolderSource, asked: int) -> bytes:
        if asked == index:
            os.open(fifo, os.O_RDONLY)
        return plain(source, asked)

    monkeypatch.setattr(FolderSource, "read", read)


@pytest.mark.parametrize(("decoder", "workers"), LOADERS)
@pytest.mark.usefixtures("hurry")
def test_a_reader_that_hangs_is_named_and_left_when_a_stop_is_asked_for(
    images: Path,
    fifo: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    decoder: str,
    workers: int,
) -> None:
    opened = open_images(images, decoder=decoder)
    items = items_of(opened)
    stuck = int(opened.indices(items[1])[1])
    hang_in(monkeypatch, fifo, stuck)
    warned, has_first = threading.Event(), threading.Event()
    # One handler serves all tests of a process: what is set in it must be taken back.
    monkeypatch.setattr(caplog.handler, "emit", lambda _record: warned.set())
    events = (warned, has_first)  # the read may hang before the first batch is there
    stop = lambda: Vote.EXIT_NOW if all(e.is_set() for e in events) else Vote.GO_ON  # noqa: E731
    monkeypatch.setattr(patience.log, "propagate", True)
    batches = PatientBatches(load_batches(opened, items, workers), opened, stop, CPU)
    next(batches)
    has_first.set()
    with pytest.raises(Stranded, match=opened.train.where(stuck)) as left:
        next(batches)
    assert left.value.vote is Vote.EXIT_NOW


def wrap(images: Images, batches: Iterator[Batch]) -> PatientBatches:
    return PatientBatches(batches, images, lambda: Vote.GO_ON, CPU)


def test_batches_and_errors_come_through_unchanged(images: Path) -> None:
    opened = open_images(images)

    def two_and_an_error() -> Iterator[Batch]:
        yield opened[items_of(opened)[0]]
        yield opened[items_of(opened)[1]]
        raise DataError("the third is bad")

    batches = wrap(opened, two_and_an_error())
    assert [len(next(batches).labels) for _ in range(2)] == [2, 2]
    with pytest.raises(DataError, match="the third is bad"):
        next(batches)
    assert list(wrap(opened, iter(()))) == []


@pytest.mark.parametrize(
    ("world", "stuck_rank", "loader"),
    [
        (1, 0, ("-j", "2", "--decoder", "pil")),
        (2, 0, ("-j", "0")),
        (2, 1, ("-j", "2", "--decoder", "kernel")),
    ],
)
def test_a_run_whose_read_hangs_saves_and_exits_85_on_sigterm(
    images: Path, tmp_path: Path, fifo: Path, world: int, stuck_rank: int, loader: tuple[str, ...]
) -> None:
    """The third step's batch never comes in one rank; the others wait for it in an exchange."""
    out, whole = tmp_path / "out", tmp_path / "whole"
    argv = [str(images), "--epochs", "1", "--microbatch", "4", *loader, "--output"]
    part = 8 // world * stuck_rank
    stuck = int(epoch_order(0, 0, 42)[2 * 8 + part])
    hook = partial(
        hooks.all_of,
        partial(hooks.set_value, "train.data.patience", "WARN_S", 0.5),
        partial(hooks.set_value, "train.data.patience", "STOP_S", 0.5),
        partial(hooks.hang_at_read, stuck_rank, stuck, fifo),
    )
    job = ranks.start([*argv, str(out)], tmp_path / "log", world, hook=hook)
    name = open_dataset(images, None).train.where(stuck)
    job.wait_for_log(" step 2/")  # it may hang while the batches before it are awaited
    job.wait_for_log(f"{name} has been read for")
    job.send(signal.SIGTERM)
    job.expect(CHECKPOINTED)
    assert "Traceback" not in job.log
    assert stopped_at(out) == 2
    assert "SIGTERM" in read_run(out)["attempts"][0]["reason"]
    ranks.run([*argv, str(out)], tmp_path / "log1", world).expect(DONE)
    ranks.run([*argv, str(whole)], tmp_path / "log2", world).expect(DONE)
    states = [final_state(out), final_state(whole)]
    for state in states:  # one of several ranks can only estimate the loss of the others
        state["epoch_sums"] = {} if world > 1 else state["epoch_sums"]
    assert find_differences(states[0], states[1]) == []


def test_a_validation_whose_read_hangs_is_left_for_the_next_start(
    images: Path, tmp_path: Path, fifo: Path
) -> None:
    out = tmp_path / "out"
    argv = [str(images), "--epochs", "1", "--output", str(out)]
    hook = partial(
        hooks.all_of,
        partial(hooks.set_value, "train.data.patience", "WARN_S", 0.5),
        partial(hooks.set_value, "train.data.patience", "STOP_S", 0.5),
        partial(hooks.at_validation, 0, 1, partial(hooks.hang_at_read, 0, 8, fifo)),
    )
    job = ranks.start(argv, tmp_path / "log", hook=hook)
    job.wait_for_log("has been read for")
    job.send(signal.SIGTERM)
    job.expect(CHECKPOINTED)
    assert stopped_at(out) == 5
    ranks.run(argv, tmp_path / "log1").expect(DONE)
    assert read_run(out)["result"]["final_acc1"] is not None


@pytest.mark.parametrize("kind", ["fifo", "socket", "folder"])
def test_what_is_named_like_an_image_and_is_no_file_is_never_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = tmp_path / "train" / "n1"
    folder.mkdir(parents=True)
    (folder / "a.JPEG").write_bytes(b"an image")
    odd = folder / "b.JPEG"
    if kind == "fifo":
        os.mkfifo(odd)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            monkeypatch.chdir(folder)  # the path of a socket is short
            listener.bind("b.JPEG")
    else:
        odd.mkdir()
    assert len(FolderSource(tmp_path / "train")) == 1


@pytest.mark.parametrize("target", ["fifo", "/dev/zero"])
def test_a_link_or_a_swap_to_something_that_is_no_file_is_refused_at_once(
    tmp_path: Path, fifo: Path, target: str
) -> None:
    folder = tmp_path / "train" / "n1"
    folder.mkdir(parents=True)
    image = folder / "a.JPEG"
    image.write_bytes(b"an image")
    source = FolderSource(tmp_path / "train")
    image.unlink()
    image.symlink_to(fifo if target == "fifo" else target)
    with pytest.raises(DataError, match=r"n1/a.JPEG is not a regular file"):
        source.read(0)
