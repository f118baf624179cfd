"""Which GPUs are taken: those that this build of torch has kernels for, and that compute."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from condor import slot
from dataset.errors import TRY_AGAIN, USER_MISTAKE
from scripts.checks.surroundings import look_at_gpus
from tests.gpu_sim import ranks as gpu
from tests.gpu_sim import stories

pytestmark = [pytest.mark.gpusim, pytest.mark.timeout(300)]
DEVICES_BUSY = 46  # cudaErrorDevicesUnavailable
V100 = {"CUDASIM_CAPABILITY": 70, "CUDASIM_NAME": "Tesla V100-SXM2-16GB"}


def ask_slot() -> None:
    code = slot.main(["check"])
    sys.stdout.flush()
    os._exit(code)


def ask_doctor() -> None:
    finding = look_at_gpus(os.environ, torch, 0)
    print(finding.level, finding.text, finding.problem)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        pytest.param(
            V100,
            ("no kernels for this GPU, Tesla V100-SXM2-16GB, of capability 7.0", "cu126"),
            id="V100",
        ),
        pytest.param(
            {"CUDASIM_DRIVER": 12020}, ("the driver is for CUDA 12.2", "cu126"), id="old driver"
        ),
    ],
)
def test_a_gpu_that_this_build_of_torch_cannot_use_is_refused_with_the_build_that_can(
    tmp_path: Path, settings: dict[str, object], words: tuple[str, ...]
) -> None:
    """Before any data is fetched, and in the slot as the slot's fault."""
    argv = ["--dummy", "--max-steps", "1", "--output", str(tmp_path / "out")]
    trainer = gpu.run(argv, tmp_path / "trainer", settings=settings).expect(USER_MISTAKE)
    given = settings | {"CUDA_VISIBLE_DEVICES": 0, "DATA": "dummy"}
    in_slot = gpu.call(ask_slot, tmp_path / "slot", **given).expect(TRY_AGAIN)
    doctor = gpu.call(ask_doctor, tmp_path / "doctor", **given).expect(0)
    assert "\nwrong given: CUDA_VISIBLE_DEVICES=0" in doctor.log
    for log in (trainer.log, in_slot.log, doctor.log):
        assert [word for word in words if word not in log] == []
        assert "Traceback" not in log


def test_a_gpu_that_is_busy_is_tried_again(tmp_path: Path) -> None:
    argv = ["--dummy", "--max-steps", "1", "--output", str(tmp_path / "out")]
    broken = partial(stories.break_gpu_for_kernels, DEVICES_BUSY)
    trainer = gpu.run(argv, tmp_path / "trainer", hook=broken).expect(TRY_AGAIN)
    assert "does not compute: CUDA error" in trainer.log
    assert "busy or unavailable" in trainer.log


def test_the_slot_and_the_doctor_pass_a_gpu_that_computes(tmp_path: Path) -> None:
    given = {"CUDA_VISIBLE_DEVICES": "GPU-a0b0c000", "DATA": "dummy"}
    assert "cuda" in gpu.call(ask_slot, tmp_path / "slot", **given).expect(0).log.split()
    assert gpu.call(ask_doctor, tmp_path / "doctor", **given).expect(0).log.startswith("ok")


def test_the_stage_profile_finds_the_gpu_by_htcondors_short_uuid(tmp_path: Path) -> None:
    argv = ["--dummy", "--max-steps", "1", "--output", str(tmp_path)]
    settings = {"CUDASIM_DEVICES": 2, "CUDA_VISIBLE_DEVICES": "GPU-a0b0c001"}
    gpu.run(argv, tmp_path / "log", settings=settings).expect(0)
    stages = [json.loads(line) for line in (tmp_path / "stages.jsonl").open()]
    assert "gpu_pct" in next(stage for stage in stages if stage["stage"] == "train")
