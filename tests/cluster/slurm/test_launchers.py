"""Launchers inside launchers on the real SLURM: the inner one wins, a contradiction is refused."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dataset.errors import CHECKPOINTED
from tests.cluster.mpi import MPI_ENV
from tests.cluster.slurm.conftest import TRAIN_FLAGS
from tests.cluster.slurm.jobs import wait_until
from tests.conftest import ROOT
from train.records.record import read_run

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

PROJECT = {"PYTHONPATH": str(ROOT)}
DUMMY = ["--dummy", "--max-steps", "2", *TRAIN_FLAGS]


def test_under_srun_and_torchrun_the_inner_launcher_wins(slurm: ModuleType, tmp_path: Path) -> None:
    """The step has one task, torchrun starts two ranks in it."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    train = ["-m", "train", *DUMMY, "--output", tmp_path / "run"]
    done = slurm.srun("--ntasks=1", *torchrun, *train, env=PROJECT)
    assert done.returncode == 0, done.stdout + done.stderr
    run = read_run(tmp_path / "run")
    assert (run["world_size"], run["attempts"][0]["launcher"]) == (2, "torchrun")
    assert run["scheduler"]["kind"] == "slurm"


def test_an_interrupt_by_scancel_saves_on_all_ranks_of_a_step(
    slurm: ModuleType, tmp_path: Path
) -> None:
    """A Ctrl-C in srun itself is no way to do it: srun kills the ranks right after it."""
    out = tmp_path / "run"
    train = [sys.executable, "-m", "train", "--dummy", "-p", "1", *TRAIN_FLAGS]
    words = shlex.join(["srun", *train, "--output", str(out)])
    job = slurm.sbatch("--ntasks=2", "--time=10", f"--wrap={words}", cwd=tmp_path, env=PROJECT)
    wait_until(lambda: "step 2/" in job.output(), "the second step")
    slurm.run("scancel", "--signal=INT", f"{job.id}.0")
    job.wait()
    run = read_run(out)
    assert (run["status"], run["exit_code"]) == ("checkpointed", CHECKPOINTED), job.output()
    assert run["attempts"][0]["reason"] == "SIGINT"


@pytest.mark.mpi
def test_mpirun_inside_an_allocation_spans_its_nodes(
    slurm: ModuleType, mpirun: str, tmp_path: Path
) -> None:
    """Open MPI starts its daemon on the second node as a step, with variables of its own."""
    train = " ".join([sys.executable, "-m train", *DUMMY, "--output", str(tmp_path / "run")])
    options = ["--nodes=2", "--ntasks-per-node=1", "--time=10"]
    job = slurm.sbatch(*options, f"--wrap={mpirun} {train}", cwd=tmp_path, env=PROJECT | MPI_ENV)
    assert job.wait()["JobState"] == "COMPLETED", job.output()
    run = read_run(tmp_path / "run")
    assert (run["world_size"], run["num_nodes"]) == (2, 2)
    assert run["attempts"][0]["launcher"] == "openmpi"


DETECT = """
import os
from dataset.errors import UserError
from train.ranks.launch import detect_launch
try:
    launch = detect_launch(os.environ)
    print(launch.launcher, launch.rank, launch.world_size)
except UserError as error:
    print("refused:", error)
"""


@pytest.mark.parametrize(
    ("exported", "words"),
    [
        ({"WORLD_SIZE": "3"}, "WORLD_SIZE=3 contradicts SLURM_STEP_NUM_TASKS=2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}, "RANK=0"),
        ({"RANK": "0"}, "RANK=0 is set but WORLD_SIZE"),
    ],
)
def test_contradictory_variables_are_refused_with_both_values(
    slurm: ModuleType, exported: dict[str, str], words: str
) -> None:
    python = [sys.executable, "-S", "-c", DETECT]
    done = slurm.srun("--ntasks=2", *python, env=PROJECT | exported)
    refusals = [line for line in done.stdout.splitlines() if line.startswith("refused:")]
    assert refusals, done.stdout + done.stderr
    assert all(words in refusal for refusal in refusals)


def test_salloc_s_own_shell_is_not_a_rank(slurm: ModuleType) -> None:
    """salloc runs its command in no step: as refused as in sbatch."""
    python = [sys.executable, "-S", "-c", DETECT]
    done = slurm.run("salloc", "--ntasks=2", "--time=10", *python, env=PROJECT)
    assert done.stdout.startswith("refused: SLURM_NTASKS=2 but this process is not in a step")
