"""Data and flags for runs of the real trainer that take seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

# 4 classes x 24 images: 6 steps an epoch. One thread a rank: four ranks share two cores.
BATCH = 16
TRAIN_FLAGS = ["-a", "resnet18", "--image-size", "32", "-b", str(BATCH), "--device", "cpu"]
TRAIN_FLAGS += ["--threads", "1", "-j", "0", "-p", "1"]
NUM_TRAIN, NUM_VAL = 96, 36


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ILSVRC tars with a few small images, indexed: the ranks train straight from them."""
    folder = tmp_path_factory.mktemp("tiny")
    command = [sys.executable, str(ROOT / "scripts/make_fake_imagenet.py"), "--out", str(folder)]
    command += ["--classes", "4", "--train-per-class", "24", "--val-per-class", "9"]
    subprocess.run([*command, "--size", "64x48"], check=True, capture_output=True, timeout=60)
    return folder
