"""A job of condor/train.sub that trains while its tars arrive, and is vacated on the way."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dataset.archive.index import build_index
from dataset.fake.make import make_fake_imagenet
from dataset.names import INDEX_SUFFIX, TRAIN_TAR, VAL_TAR
from tests.cluster.condor.grid_mode import (
    ROOT,
    SLOW,
    read_output,
    read_result,
    result_folder,
    submit_training,
    wait_for_step,
)
from train.records.record import read_lines

pytestmark = [pytest.mark.condor, pytest.mark.osdf, pytest.mark.timeout(900)]
FLAGS = f"{SLOW} --threads 1"
MODEL = "resnet18_2_classes.pt"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two tars with their indexes: 8 steps an epoch."""
    folder = tmp_path / "imagenet"
    make_fake_imagenet(folder, classes=2, train_per_class=64, val_per_class=2, size=(120, 90))
    for name in (TRAIN_TAR, VAL_TAR):
        build_index(folder / name, checksums=True)
    return folder


def train_locally(data: Path, out: Path) -> Path:
    """The same run from the local tars, in the streamed order."""
    command = [sys.executable, "-m", "train", str(data), "--order", "streamed", "--save-model"]
    command += ["--output", str(out), "--epochs", "3", "--seed", "3", "--device", "cpu"]
    subprocess.run([*command, *FLAGS.split()], cwd=ROOT, check=True, timeout=300)
    return out / MODEL


def test_a_streamed_job_that_is_vacated_goes_on_as_if_nothing_was(
    condor: ModuleType, osdf: ModuleType, data: Path, tmp_path: Path
) -> None:
    folder = f"grid-stream-{os.urandom(4).hex()}"
    names = [name + end for name in (TRAIN_TAR, VAL_TAR) for end in ("", INDEX_SUFFIX)]
    paths = {name: osdf.put(f"{folder}/{name}", data / name) for name in names}
    job = submit_training(
        condor, DATA=f"osdf://{paths[TRAIN_TAR]},osdf://{paths[VAL_TAR]}",
        FEDERATION=osdf.DIRECTOR_HTTP_URL, SEED="3", EPOCHS="3", TRAIN=FLAGS,
    )  # fmt: skip
    wait_for_step(condor, job)
    job.act("vacate_job")
    assert job.wait() == 0, read_output(job)

    said = read_output(job)
    (stopped,) = re.findall(r"SIGTERM: stopped at step (\d+) of 24 with a checkpoint", said)
    (resumed,) = re.findall(r"continuing from step (\d+) of 24", said)
    assert resumed == stopped
    run = read_result(job)
    assert [attempt["reason"] for attempt in run["attempts"]] == ["SIGTERM", "done"]
    for attempt in run["attempts"]:  # each in a new sandbox: nothing was there before
        assert attempt["stream"]["bytes_fetched"] > 0 == attempt["stream"]["bytes_resumed"]
    assert run["attempts"][-1]["stream"]["is_whole"]
    assert run["config"]["order"] == "streamed"
    stages = {line["stage"] for line in read_lines(result_folder(job) / "stages.jsonl")}
    assert "fetch" not in stages
    home = {path.name for path in result_folder(job).iterdir()} - {".lock"}
    assert home == {"run.json", "epochs.jsonl", "stages.jsonl", "classes.json", MODEL}

    ours = torch.load(result_folder(job) / MODEL, weights_only=True)
    local = torch.load(train_locally(data, tmp_path / "local"), weights_only=True)
    assert ours.keys() == local.keys()
    assert all(torch.equal(ours[name], local[name]) for name in ours)
