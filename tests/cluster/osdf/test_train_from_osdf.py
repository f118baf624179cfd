"""The trainer on a URL: two ranks of one node fetch once, and train from the tar."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dataset.fake.make import make_fake_imagenet
from tests.conftest import ROOT

FLAGS = ["-a", "resnet18", "--image-size", "32", "-b", "8", "--epochs", "1"]
FLAGS += ["--max-steps", "2", "--threads", "1", "-j", "0"]


@pytest.mark.osdf
def test_two_ranks_train_from_a_url_and_fetch_it_once(osdf: ModuleType, tmp_path: Path) -> None:
    made = tmp_path / "made"
    make_fake_imagenet(made, classes=3, train_per_class=8, val_per_class=3, size=(48, 48))
    for file in made.iterdir():
        osdf.put(f"train-test/{file.name}", file)
    train_bytes = (made / "ILSVRC2012_img_train.tar").stat().st_size
    osdf.forget_traffic("*train-test*")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["-m", "train", "osdf:///public/train-test", "--federation", osdf.DIRECTOR_HTTP_URL]
    command += ["--data-dir", str(tmp_path / "data"), "--output", str(tmp_path / "run"), *FLAGS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (run["status"], run["images_trained"], run["world_size"]) == ("done", 16, 2)
    assert run["dataset"]["source"] == "tar"
    lines = (tmp_path / "run" / "stages.jsonl").read_text().splitlines()
    assert [json.loads(line)["stage"] for line in lines] == ["fetch", "train", "evaluate"]
    sent = osdf.sent_bytes("/public/train-test/ILSVRC2012_img_train.tar", "cache*")
    assert train_bytes <= sent < 1.05 * train_bytes  # once for both ranks
    fetched = (tmp_path / "data" / "ILSVRC2012_img_train.tar").read_bytes()
    assert fetched == (made / "ILSVRC2012_img_train.tar").read_bytes()
