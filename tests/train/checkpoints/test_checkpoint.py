"""Checkpoints are whole or not there: kills at every call, full disks, damage, strangers."""

from __future__ import annotations

import math
import os
import random
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dataset.errors import DataError, UserError
from tests.mounts import mounted
from tests.train import started_ranks as ranks
from tests.train.checkpoints.small_states import save, state_at, steps_in
from train.checkpoints import checkpoint
from train.checkpoints.checkpoint import (
    CheckpointWriter,
    list_checkpoints,
    load_checkpoint,
    load_latest,
)
from train.checkpoints.snapshot import copy_to_host
from train.epoch import Standing
from train.evaluate import Accuracy

Best = dict[str, Any]


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(2, 3, 5, 5)).sum().backward()
    optimizer.step()
    state = state_at(7) | {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    writer = CheckpointWriter(tmp_path)
    writer.save(state)
    before = copy_to_host(state)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(1)  # training goes on while the state is written
    assert writer.wait()
    _, loaded = load_latest(tmp_path)
    assert loaded is not None
    assert loaded["optimizer"]["param_groups"] == before["optimizer"]["param_groups"]
    for name, tensor in before["model"].items():
        assert torch.equal(loaded["model"][name], tensor)
    for key, slot in before["optimizer"]["state"].items():
        found = loaded["optimizer"]["state"][key]["momentum_buffer"]
        assert torch.equal(found, slot["momentum_buffer"])


def test_the_two_latest_are_kept_and_the_best(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path)
    for step in (2, 4, 6, 8):
        assert save(writer, step, is_best=step == 4)
    assert steps_in(tmp_path) == [6, 8]
    assert load_checkpoint(tmp_path / "best.pt")["step"] == 4
    assert not list(tmp_path.glob("*.part"))


def test_the_best_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a filesystem without hard links."""
    writer = CheckpointWriter(tmp_path)
    save(writer, 1, is_best=True)

    def refuse(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    save(writer, 2, is_best=True)
    assert load_checkpoint(tmp_path / "best.pt")["step"] == 2
    assert steps_in(tmp_path) == [1, 2]


def test_after_going_back_the_given_up_steps_do_not_come_back(tmp_path: Path) -> None:
    """--resume of an older file, or newer ones that the disk damaged: the new course survives."""
    writer = CheckpointWriter(tmp_path)
    for step in (8, 10):
        save(writer, step)
    assert save(writer, 5)
    assert steps_in(tmp_path) == [5]
    assert save(writer, 6)
    assert steps_in(tmp_path) == [5, 6]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["model", "ema", "optimizer"])
def test_values_that_are_not_finite_are_not_written(tmp_path: Path, bad: float, where: str) -> None:
    writer = CheckpointWriter(tmp_path)
    save(writer, 1)
    spoilt: dict[str, Any] = {where: {"deep": [{"w": torch.tensor([1.0, bad])}]}}
    assert not save(writer, 2, **spoilt)
    assert writer.not_finite
    assert steps_in(tmp_path) == [1]
    assert not list(tmp_path.glob("*.part"))


def test_a_writer_that_fails_says_so_even_after_a_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that nobody foresaw must not look like the success before it."""
    writer = CheckpointWriter(tmp_path)
    assert save(writer, 1)

    def fail(*_: object) -> None:
        raise TypeError("unforeseen")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(TypeError, match="unforeseen"):
        save(writer, 2)
    assert steps_in(tmp_path) == [1]


# --- full disks -------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 1 MB of its own."""
    with mounted(tmp_path / "disk", "size=1m") as folder:
        yield folder


def test_a_full_disk_keeps_the_older_checkpoint_and_says_so(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = CheckpointWriter(small_disk)
    with caplog.at_level("WARNING", "trainyard"):
        checkpoint.log.propagate = True
        assert save(writer, 1, size=150_000)  # 600 kB
        assert not save(writer, 2, size=150_000)
    assert "checkpoint of step 2 not written: No space left on device" in caplog.text
    assert "free some space" in caplog.text and "inline_container" not in caplog.text
    assert steps_in(small_disk) == [1]
    assert not list(small_disk.glob("*.part"))
    _, loaded = load_latest(small_disk)
    assert loaded is not None and loaded["step"] == 1
    assert save(writer, 3, size=50_000)  # room for a smaller one: writing goes on


# --- kills ------------------------------------------------------------------------------------

CALLS = ("replace", "link", "fsync", "unlink", "write")


def kill_at_call(number: int) -> None:
    """From now on the process dies before its n-th call that changes the disk."""
    left = number

    def deadly(plain: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, deadly(getattr(os, name)))
    torch.save = deadly(torch.save)


def write_until_killed(folder: Path, number: int) -> None:
    writer = CheckpointWriter(folder)
    kill_at_call(number)
    for step in (3, 4):
        is_best = step % 2 == 0
        best = {"best_epoch": step if is_best else step - 1}
        save(writer, step, is_best=is_best, best=best)


def test_a_kill_before_any_call_leaves_whole_files_and_a_best_that_fits(tmp_path: Path) -> None:
    """Every prefix of the calls of two saves; each is a process that kills itself there."""
    jobs = []
    for number in range(1, 15):
        folder = tmp_path / str(number)
        writer = CheckpointWriter(folder)
        save(writer, 1, best={"best_epoch": 0})
        save(writer, 2, is_best=True, best={"best_epoch": 2})
        write = partial(write_until_killed, folder, number)
        jobs.append((folder, ranks.call(write, tmp_path / f"log{number}")))
    codes = []
    for folder, job in jobs:
        codes += job.wait()
        check_whole(folder)
        CheckpointWriter(folder)  # the next start clears what the killed one left
        assert not list(folder.glob("*.part"))
    assert codes.count(-signal.SIGKILL) >= 10  # the calls were met


def check_whole(folder: Path) -> None:
    states = [load_checkpoint(path) for path in list_checkpoints(folder)]
    assert 1 <= len(states) <= 3
    _, latest = load_latest(folder)
    assert latest is not None and latest["step"] == max(state["step"] for state in states) >= 2
    best = load_checkpoint(folder / "best.pt")
    assert best["step"] >= latest["best"]["best_epoch"]


# --- damage and strangers ---------------------------------------------------------------------


def test_a_damaged_latest_falls_back_to_the_one_before(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path)
    save(writer, 1)
    save(writer, 2)
    path = tmp_path / checkpoint.file_name(2)
    whole = path.read_bytes()
    for size in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        _, loaded = load_latest(tmp_path)
        assert loaded is not None and loaded["step"] == 1
    for seed in range(100):  # torch takes them for a pickle, and trips in many ways
        path.write_bytes(random.Random(seed).randbytes(2000))
        _, loaded = load_latest(tmp_path)
        assert loaded is not None and loaded["step"] == 1
    (tmp_path / checkpoint.file_name(1)).write_bytes(b"")
    with pytest.raises(DataError, match=r"no checkpoint .* is intact; move it away"):
        load_latest(tmp_path)


def test_when_the_two_latest_are_damaged_a_whole_best_is_named(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path)
    save(writer, 1, is_best=True)
    save(writer, 2)
    save(writer, 3)
    for path in checkpoint.list_checkpoints(tmp_path):
        path.write_bytes(b"")
    best = tmp_path / "best.pt"
    with pytest.raises(DataError, match=rf"--resume {best} continues from the best epoch"):
        load_latest(tmp_path)
    assert load_checkpoint(best)["step"] == 1


def test_a_latest_that_the_disk_cannot_read_falls_back_to_the_one_before(tmp_path: Path) -> None:
    save(CheckpointWriter(tmp_path), 1)
    # The kernel answers EIO to a read of its first page, as a disk does for a bad sector.
    (tmp_path / checkpoint.file_name(2)).symlink_to("/proc/self/mem")
    _, loaded = load_latest(tmp_path)
    assert loaded is not None and loaded["step"] == 1


def test_an_empty_folder_is_a_fresh_start_and_a_missing_name_is_not(tmp_path: Path) -> None:
    assert load_latest(tmp_path) == (None, None)
    assert load_latest(tmp_path / "not" / "there") == (None, None)
    with pytest.raises(UserError, match="no such checkpoint"):
        load_checkpoint(tmp_path / "step-000000001.pt")


@pytest.mark.parametrize(
    "content",
    [
        {"w": torch.zeros(2)},
        {"state_dict": {}, "epoch": 3},
        [1, 2],
        {"schema": "one", "step": 1, "model": {}, "identity": {}},
        {"schema": None, "step": 1, "model": {}, "identity": {}},
        {"schema": 1, "step": 1, "model": {}, "identity": {}},
    ],
)
def test_a_foreign_file_is_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(UserError, match="not a checkpoint of this trainer"):
        load_checkpoint(tmp_path / "x.pt")


def test_a_newer_schema_and_a_pickle_with_code_are_refused(tmp_path: Path) -> None:
    torch.save(state_at(1) | {"schema": 99}, tmp_path / "new.pt")
    with pytest.raises(UserError, match="schema 99"):
        load_checkpoint(tmp_path / "new.pt")
    torch.save(state_at(1) | {"model": partial(print, "code")}, tmp_path / "code.pt")
    with pytest.raises(UserError, match="cannot be loaded safely"):
        load_checkpoint(tmp_path / "code.pt")


def test_changes_are_shown_as_old_and_new() -> None:
    old, new = {"lr": 0.1, "arch": "a", "gone": 1}, {"lr": 0.2, "arch": "a", "new": 2}
    assert (
        checkpoint.describe_changes(old, new) == "lr: 0.1 -> 0.2, gone: 1 -> None, new: None -> 2"
    )
    assert checkpoint.describe_changes(old, dict(old)) == ""


def test_of_equal_accuracies_the_one_with_the_lower_loss_is_the_best() -> None:
    standing = Standing()
    losses = [2.0, 2.5, 1.5, math.nan, 1.5]
    results = [Accuracy(5, 9, 10, 0, loss) for loss in losses]
    assert [standing.take(i, [r]) for i, r in enumerate(results)] == [
        True,
        False,
        True,
        *[False] * 2,
    ]
    assert (standing.best["best_epoch"], standing.best["best_loss"]) == (2, 1.5)
    assert standing.take(5, [Accuracy(6, 9, 10, 0, math.nan)])  # the accuracy comes first
    assert standing.take(6, [Accuracy(6, 9, 10, 0, 9.0)])
    assert not standing.take(7, [Accuracy(5, 9, 10, 0, 0.1)])


def test_a_tie_with_a_best_of_an_older_checkpoint_changes_nothing() -> None:
    standing = Standing(best={"best_acc1": 50.0, "best_acc5": 90.0, "best_epoch": 1})
    assert not standing.take(2, [Accuracy(5, 9, 10, 0, 0.1)])
