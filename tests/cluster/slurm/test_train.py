"""The real trainer under the real SLURM: from sbatch to the records, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.cluster.slurm.conftest import BATCH, NUM_TRAIN, NUM_VAL, TRAIN_FLAGS
from tests.conftest import ROOT
from train.records.record import read_epochs, read_run

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

SBATCH = ROOT / "slurm/train.sbatch"
DUMMY = ["--dummy", "--max-steps", "2", *TRAIN_FLAGS]
PROJECT = {"PYTHONPATH": str(ROOT)}


def test_sbatch_trains_four_ranks_on_four_nodes_and_leaves_records(
    slurm: ModuleType, tiny_data: Path, tmp_path: Path
) -> None:
    scale = ["--nodes=4", "--ntasks-per-node=1"]
    job = slurm.sbatch(*scale, SBATCH, tiny_data, "--epochs", "2", *TRAIN_FLAGS, cwd=tmp_path)
    assert job.wait()["JobState"] == "COMPLETED", job.output()
    run = read_run(tmp_path / "run_results/cpu" / job.id)
    assert (run["status"], run["exit_code"]) == ("done", 0)
    assert (run["world_size"], run["num_nodes"]) == (4, 4)
    assert run["attempts"][0]["launcher"] == "srun"
    assert run["scheduler"]["job_id"] == job.id
    assert run["dataset"]["num_val"] == NUM_VAL
    epochs = read_epochs(tmp_path / "run_results/cpu" / job.id)
    assert [epoch["images"] for epoch in epochs] == [NUM_TRAIN // BATCH * BATCH] * 2
    assert run["result"]["final_acc1"] == epochs[-1]["val_acc1"]


def test_bare_python_inside_sbatch_is_refused(slurm: ModuleType, tmp_path: Path) -> None:
    bare = f"{sys.executable} -m train {' '.join(DUMMY)}"
    job = slurm.sbatch("--ntasks=4", f"--wrap={bare}", cwd=tmp_path, env=PROJECT)
    assert job.wait()["ExitCode"] == "2:0"
    (line,) = job.output().splitlines()
    assert line.startswith("error: SLURM_NTASKS=4 but this process is not in a step")
    assert "srun python -m train" in line


def test_given_gpus_that_cannot_be_used_are_refused(slurm: ModuleType, tmp_path: Path) -> None:
    """No silent week on a CPU: the device files of this SLURM have no GPU behind them."""
    flags = [flag for flag in DUMMY if flag not in ("--device", "cpu")]
    job = slurm.sbatch(SBATCH, *flags, cwd=tmp_path)
    assert job.wait()["ExitCode"] == "2:0"
    assert "error: no usable CUDA device (SLURM_STEP_GPUS=0)" in job.output()
    assert "--device cpu" in job.output()


# How sbatch files of older PyTorch projects look. The port is the same in every job, which must not
# make two jobs on one node collide.
OLD_FILE = f"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --time=10
export WORLD_SIZE=$((SLURM_NNODES * SLURM_NTASKS_PER_NODE))
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=29500
srun --kill-on-bad-exit=1 {sys.executable} -m train {" ".join(DUMMY)}
"""


def test_two_jobs_at_once_that_export_the_same_world_and_port_do_not_collide(
    slurm: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "old.sbatch").write_text(OLD_FILE)
    jobs = [slurm.sbatch(tmp_path / "old.sbatch", cwd=tmp_path, env=PROJECT) for _ in range(2)]
    for job in jobs:
        shown = job.wait()
        assert shown["JobState"] == "COMPLETED", job.output()
        assert shown["NodeList"] == "n[1-2]"
    runs = [read_run(tmp_path / "run_results/cpu" / job.id) for job in jobs]
    assert [run["world_size"] for run in runs] == [2, 2]
    first, second = (run["attempts"][0] for run in runs)
    assert first["start"] < second["end"] and second["start"] < first["end"], "not at the same time"


DEVICE_OF_A_RANK = """
import os, torch
import train.device
from train.device import choose_device
from train.ranks.launch import detect_launch
# A stand-in for CUDA, which this machine lacks: as many devices as SLURM lets this task see.
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))
torch.cuda.set_device = lambda index: None
train.device.require_kernels = lambda *device: None
launch = detect_launch(os.environ)
device = choose_device("auto", launch, os.environ)
print(launch.rank, os.environ["CUDA_VISIBLE_DEVICES"], device)
"""


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ("--gres=gpu:4", ["0 0,1,2,3 cuda:0", "1 0,1,2,3 cuda:1"]),
        ("--gpus-per-task=1", ["0 0 cuda:0", "1 1 cuda:0"]),
    ],
)
def test_a_rank_takes_its_own_gpu_however_slurm_shows_them(
    slurm: ModuleType, gpus: str, expected: list[str]
) -> None:
    python = [sys.executable, "-c", DEVICE_OF_A_RANK]
    done = slurm.srun(gpus, "--nodes=1", "--ntasks=2", *python, env=PROJECT)
    assert sorted(done.stdout.splitlines()) == expected, done.stderr
