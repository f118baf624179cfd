"""The trainer on a GPU: on a real one where there is one, else on the simulated one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu_sim.ranks import HAS_GPU, read_run, run_on_gpu

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_each_precision_trains_with_accumulation_and_ema(tmp_path: Path, precision: str) -> None:
    flags = f"--dummy -b 16 --microbatch 8 --max-steps 3 --ema 0.9 --precision {precision}"
    run_on_gpu([*flags.split(), "--output", str(tmp_path)], tmp_path / "log").expect(0)
    run = read_run(tmp_path)
    assert run["config"]["precision"] == precision
    assert run["images_trained"] == 3 * 16


def test_auto_takes_the_gpu_and_a_16_bit_format(tmp_path: Path) -> None:
    flags = f"--dummy --device auto --max-steps 2 --output {tmp_path}"
    run_on_gpu(flags.split(), tmp_path / "log").expect(0)
    run = read_run(tmp_path)
    assert run["device"].startswith("NVIDIA")
    assert run["config"]["precision"] in ("bf16", "fp16")


def test_the_stage_profile_sees_the_gpu(tmp_path: Path) -> None:
    # The figures are sampled each half second: a real GPU needs some work for that.
    flags = "-a resnet50 --image-size 224 -b 32 --max-steps 100" if HAS_GPU else "--max-steps 2"
    argv = ["--dummy", *flags.split(), "--output", str(tmp_path)]
    run_on_gpu(argv, tmp_path / "log").expect(0)
    stages = [json.loads(line) for line in (tmp_path / "stages.jsonl").open()]
    train = next(stage for stage in stages if stage["stage"] == "train")
    assert train["gpu_pct"] > 0
    assert train["peak_gpu_memory_bytes"] > 0
