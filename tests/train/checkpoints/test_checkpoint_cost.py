"""What checkpoints and records cost the training: no wait for the disk, and not every epoch."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dataset.errors import DONE
from tests.gpu_sim import ranks as gpu
from tests.train import hooks
from tests.train import started_ranks as ranks
from tests.train.outcomes import find_differences
from train.checkpoints.checkpoint import CheckpointWriter, list_checkpoints, load_checkpoint
from train.records.record import read_epochs

STEPS = 5  # of an epoch of the fake data at batch 8


def note_fsyncs(path: Path) -> None:
    """Adds a line for each fsync of the main thread; a hook of a rank."""
    plain = os.fsync

    def fsync(fd: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            with open(path, "a") as file:
                file.write(f"{Path(f'/proc/self/fd/{fd}').readlink()}\n")
        plain(fd)

    os.fsync = fsync


def train_only(images: Path, folder: Path) -> Path:
    """The training images without validation: no epoch is ever the best one."""
    (folder / "data").mkdir()
    (folder / "data" / "train").symlink_to(images / "train")
    return folder / "data"


def test_an_epoch_waits_for_the_disk_once_and_is_saved_only_where_the_last_is_old(
    images: Path, tmp_path: Path
) -> None:
    data, waits, steps = train_only(images, tmp_path), [], []
    for epochs, gap_s in ((1, 1e9), (4, 1e9), (4, 0.0)):
        name = f"{epochs}-{gap_s}"
        hook = partial(
            hooks.all_of,
            partial(note_fsyncs, tmp_path / f"fsyncs-{name}"),
            partial(hooks.set_value, "train.records.recorder", "TOUCH_S", 1e9),  # a slow machine
            partial(hooks.set_value, "train.records.output_writer", "MIN_GAP_S", gap_s),
        )
        out = tmp_path / name
        argv = [str(data), "--epochs", str(epochs), "--output", str(out)]
        ranks.run(argv, tmp_path / "log", hook=hook).expect(DONE)
        waits.append((tmp_path / f"fsyncs-{name}").read_text().splitlines())
        steps.append([load_checkpoint(p)["step"] for p in list_checkpoints(out / "ckpt")])
        assert [line["epoch"] for line in read_epochs(out)] == list(range(epochs))
    assert len(waits[1]) - len(waits[0]) <= 3, waits[1]
    assert len(waits[2]) - len(waits[0]) <= 3, waits[2]
    assert steps == [[STEPS], [4 * STEPS], [3 * STEPS, 4 * STEPS]]


def test_the_records_of_a_state_are_on_the_disk_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, done = tmp_path / "epochs.jsonl", []
    record.write_text("{}\n")
    monkeypatch.setattr(
        os, "fsync", lambda fd: done.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
    )
    writer = CheckpointWriter(tmp_path / "ckpt")
    writer.save({"step": 1}, records=[record])
    assert writer.wait()
    assert done == [f"{tmp_path}/ckpt/step-000000001.pt.part", str(record), f"{tmp_path}/ckpt"]


def test_an_error_of_the_device_while_a_state_is_fetched_reaches_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_snapshot: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr("train.checkpoints.snapshot.Snapshot.fetch", fail)
    writer = CheckpointWriter(tmp_path)
    writer.save({"step": 1})
    with pytest.raises(RuntimeError, match="illegal memory access"):
        writer.save({"step": 2})


@pytest.mark.gpusim
@pytest.mark.timeout(300)
def test_a_checkpoint_holds_the_state_of_its_step_however_late_its_copies_end(
    images: Path, tmp_path: Path
) -> None:
    """Training changes the weights while 700 tensors are on their way, a millisecond for each."""
    argv = [str(images), "--max-steps", "3", "--ema", "0.9", "--checkpoint-minutes", "1e-9"]
    kept = []
    for delay_us in (0, 1_000):
        out = tmp_path / f"out-{delay_us}"
        settings = {"CUDASIM_DMA_US": delay_us}
        gpu.run([*argv, "--output", str(out)], tmp_path / "log", settings=settings).expect(DONE)
        kept.append([load_checkpoint(path) for path in list_checkpoints(out / "ckpt")])
    for quick, slow in zip(*kept, strict=True):
        assert quick["step"] == slow["step"]
        assert find_differences(quick["model"], slow["model"]) == []
        assert find_differences(quick["optimizer"], slow["optimizer"]) == []
        assert find_differences(quick["ema"], slow["ema"]) == []
    assert [state["step"] for state in kept[0]] == [2, 3]
    first, second = (state["model"]["fc.weight"] for state in kept[0])
    assert not torch.equal(first, second)
