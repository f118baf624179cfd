"""GPUs that torch cannot use: which build of torch the doctor names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scripts.checks.surroundings import NOTE, OK, look_at_gpus
from train.ranks.gpus import name_build


@pytest.mark.parametrize(
    ("driver", "build"),
    [(12080, "the cu126 build"), (12000, "the cu126 build"), (11040, "the cu118 build")],
)
def test_an_old_driver_is_told_the_build_that_runs_with_it(driver: int, build: str) -> None:
    assert build in name_build(driver) and "docs/install.md" in name_build(driver)


def test_a_driver_that_no_build_runs_with_must_be_updated() -> None:
    assert name_build(10020) == "no build of torch >= 2.1 runs with it"


def test_a_gpu_that_nobody_gave_and_torch_cannot_use_is_noted(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()  # a stand-in for /dev: nothing is behind it
    (tmp_path / "nvidiactl").touch()
    finding = look_at_gpus({}, torch, 0, tmp_path)
    assert finding.level == (OK if torch.cuda.is_available() else NOTE)
    hidden = look_at_gpus({"CUDA_VISIBLE_DEVICES": ""}, torch, 0, tmp_path)
    assert hidden.level == OK
