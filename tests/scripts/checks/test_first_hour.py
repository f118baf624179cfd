"""`scripts/doctor.py --gpu`: what it measures on simulated GPUs, and what it recommends."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import pytest

from dataset.errors import DONE, run_command
from scripts.checks.first_hour import Trial, advise, find_best
from tests.gpu_sim import ranks as gpu_ranks


def be_doctor(*words: str) -> None:
    """Runs the doctor in place of the trainer."""
    from scripts import doctor

    sys.argv = ["doctor.py", *words]
    code = run_command(doctor.main)
    sys.stdout.flush()
    os._exit(code)


@pytest.mark.gpusim
@pytest.mark.timeout(300)
def test_the_doctor_measures_two_gpus_and_says_what_cannot_run(
    images: Path, tmp_path: Path
) -> None:
    """Nothing is computed, but memory is: 16384 images are too many; nothing can be compiled."""
    words = ["--gpu", str(images), "--arch", "resnet18", "--image-size", "32"]
    job = gpu_ranks.run(
        [],
        tmp_path / "log",
        2,
        settings={"CUDASIM_MODE": "shape", "CUDASIM_MEMORY_MB": 1500},
        hook=partial(be_doctor, *words, "--batches", "4,16384", "--steps", "1"),
    ).expect(DONE)
    lines = job.log.splitlines()
    assert sum("16384  no" in line and "does not fit" in line for line in lines) == 2
    assert any("4  yes" in line and "cannot run here: torch.compile" in line for line in lines)
    assert any(line.startswith("loader alone: ") and "images/s" in line for line in lines)
    assert any(line.startswith("link: ") and "GB/s" in line for line in lines)
    assert sum(line.startswith("use: --precision ") and " -b 8" in line for line in lines) == 1
    assert "Traceback" not in job.log


def test_the_largest_batch_among_the_fastest_is_recommended() -> None:
    trials = [
        Trial("bf16", 64, False, 1000.0),
        Trial("bf16", 128, False, 1190.0),
        Trial("fp16", 256, False, 1195.0),
        Trial("fp16", 128, False, 1200.0),
        Trial("bf16", 512, False, problem="does not fit into the memory"),
    ]
    best = find_best(trials)
    assert best == trials[2]
    assert advise(best, 4, 0.0, 0.0) == ["use: --precision fp16 -b 1024"]
    assert find_best(trials[-1:]) is None and "nothing ran" in advise(None, 1, 0.0, 0.0)[0]


def test_a_slow_loader_and_a_slow_link_are_said() -> None:
    best = Trial("bf16", 256, True, 2560.0)  # a step of 100 ms
    assert advise(best, 1, 3000.0, 40.0) == ["use: --precision bf16 --compile -b 256"]
    _, loader, link = advise(best, 1, 1000.0, 60.0)
    assert "the loader gives 1000 images/s, the GPU takes 2560" in loader
    assert "an exchange of 60 ms is long for a step of 100 ms" in link
