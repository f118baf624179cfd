"""What only a CUDA device can show; left out, and counted, elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from train.run import main

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_each_precision_trains_with_accumulation_and_ema(tmp_path: Path, precision: str) -> None:
    flags = f"--dummy -a resnet18 --image-size 64 -b 32 --microbatch 16 --max-steps 8 --ema 0.9 \
        --precision {precision} --output {tmp_path}"
    assert main(flags.split()) == 0
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["config"]["precision"] == precision
    assert run["images_trained"] == 8 * 32


def test_auto_takes_the_gpu_and_a_16_bit_format(tmp_path: Path) -> None:
    flags = f"--dummy -a resnet18 --image-size 64 -b 16 --max-steps 2 --output {tmp_path}"
    assert main(flags.split()) == 0
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["device"] == torch.cuda.get_device_name(0)
    assert run["config"]["precision"] in ("bf16", "fp16")


def test_the_stage_profile_sees_the_gpu(tmp_path: Path) -> None:
    flags = f"--dummy -a resnet50 -b 32 --max-steps 30 --output {tmp_path}"
    assert main(flags.split()) == 0
    stages = [json.loads(line) for line in (tmp_path / "stages.jsonl").open()]
    train = next(stage for stage in stages if stage["stage"] == "train")
    assert train["gpu_pct"] > 0
    assert train["peak_gpu_memory_bytes"] > 0
