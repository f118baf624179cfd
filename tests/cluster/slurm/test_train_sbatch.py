"""slurm/train.sbatch itself: scale, CPUs, GPUs, arguments and log, seen from the tasks it starts.

The trainer is a stand-in that writes down what it was given, so that these need no torch; the real
one runs in test_train.py.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.slurm

SBATCH = ROOT / "slurm/train.sbatch"
STAND_IN = """
import json, os, pathlib, sys
names = ("CUDA_VISIBLE_DEVICES", "SLURM_CPUS_PER_TASK", "SLURMD_NODENAME", "SLURM_STEP_NUM_TASKS")
seen = {name: os.environ.get(name) for name in names}
seen |= {"argv": sys.argv[1:], "cwd": os.getcwd(), "python": sys.executable}
pathlib.Path("rank" + os.environ["SLURM_PROCID"]).write_text(json.dumps(seen))
print("spoken by a rank")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the sbatch file beside a stand-in for the trainer."""
    root = tmp_path / "project"
    for folder in ("train", "slurm"):
        (root / folder).mkdir(parents=True)
    (root / "train" / "__init__.py").touch()
    (root / "train" / "__main__.py").write_text(STAND_IN)
    shutil.copy(SBATCH, root / "slurm")
    return root


@pytest.fixture
def submit_folder(tmp_path: Path) -> Path:
    """Where sbatch is called: not the project's folder, and not one with a logs/ folder."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    return folder


def read_ranks(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("rank*"), key=lambda path: int(path.name.removeprefix("rank")))
    return [json.loads(file.read_text()) for file in files]


def test_the_scale_comes_from_sbatch_and_the_rest_goes_to_the_trainer(
    slurm: ModuleType, project: Path, submit_folder: Path
) -> None:
    scale = ["--nodes=2", "--ntasks-per-node=2"]
    args = ["/data/my images", "-b", "1024", "--lr", "0.4"]
    job = slurm.sbatch(*scale, project / "slurm/train.sbatch", *args, cwd=submit_folder)
    assert job.wait()["JobState"] == "COMPLETED", job.output()

    ranks = read_ranks(submit_folder)
    assert [rank["SLURMD_NODENAME"] for rank in ranks] == ["n1", "n1", "n2", "n2"]
    assert all(rank["argv"] == args for rank in ranks)
    assert all(rank["SLURM_CPUS_PER_TASK"] == "16" for rank in ranks)
    # Two GPUs were given on each node, and both ranks of a node can reach both.
    assert [rank["CUDA_VISIBLE_DEVICES"] for rank in ranks] == ["0,1"] * 4
    log = submit_folder / f"trainyard-{job.id}.log"
    assert log.read_text().count("spoken by a rank") == 4


def test_one_task_is_one_gpu(slurm: ModuleType, project: Path, submit_folder: Path) -> None:
    job = slurm.sbatch(project / "slurm/train.sbatch", "/data", cwd=submit_folder)
    assert job.wait()["JobState"] == "COMPLETED", job.output()
    (rank,) = read_ranks(submit_folder)
    assert (rank["CUDA_VISIBLE_DEVICES"], rank["SLURM_STEP_NUM_TASKS"]) == ("0", "1")


@pytest.mark.parametrize("bind", [[], ["--gpu-bind=single:1"]], ids=["plain", "bound"])
def test_a_whole_node_may_be_asked_for_with_gres(
    slurm: ModuleType, project: Path, submit_folder: Path, bind: list[str]
) -> None:
    scale = ["--gres=gpu:4", "--ntasks-per-node=4", *bind]
    job = slurm.sbatch(*scale, project / "slurm/train.sbatch", "/data", cwd=submit_folder)
    assert job.wait()["JobState"] == "COMPLETED", job.output()
    ranks = read_ranks(submit_folder)
    assert [rank["CUDA_VISIBLE_DEVICES"] for rank in ranks] == ["0,1,2,3"] * 4


def test_no_gpu_is_asked_for_on_request(
    slurm: ModuleType, project: Path, submit_folder: Path
) -> None:
    scale = ["--gpus-per-task=0", "--cpus-per-task=2"]
    job = slurm.sbatch(*scale, project / "slurm/train.sbatch", "/data", cwd=submit_folder)
    assert job.wait()["JobState"] == "COMPLETED", job.output()
    (rank,) = read_ranks(submit_folder)
    assert rank["CUDA_VISIBLE_DEVICES"] is None
    assert rank["SLURM_CPUS_PER_TASK"] == "2"


def test_a_copy_outside_of_the_project_says_what_to_export(
    slurm: ModuleType, project: Path, submit_folder: Path
) -> None:
    mine = shutil.copy(SBATCH, submit_folder / "mine.sbatch")
    job = slurm.sbatch(mine, "/data", cwd=submit_folder)
    assert job.wait()["ExitCode"] == "2:0"
    assert "export TRAINYARD_ROOT=" in job.output()

    env = {"TRAINYARD_ROOT": str(project)}
    job = slurm.sbatch(mine, "/data", cwd=submit_folder, env=env)
    assert job.wait()["JobState"] == "COMPLETED", job.output()


def test_the_exit_code_of_a_failing_rank_is_the_jobs(
    slurm: ModuleType, project: Path, submit_folder: Path
) -> None:
    (project / "train" / "__main__.py").write_text(
        "import os, time\n"
        "if os.environ['SLURM_PROCID'] == '1': os._exit(3)\n"
        "time.sleep(600)  # a rank that waits for the failed one\n"
    )
    scale = ["--nodes=2", "--ntasks-per-node=1"]
    job = slurm.sbatch(*scale, project / "slurm/train.sbatch", "/data", cwd=submit_folder)
    assert job.wait()["JobState"] == "FAILED"
    assert "task 1: Exited with exit code 3" in job.output()


def test_an_active_environment_serves_if_it_has_torch_else_the_projects_own(
    slurm: ModuleType, project: Path, submit_folder: Path
) -> None:
    """Conda's base is active in many shells, and sbatch hands that on to the job."""
    own = project / ".venv/bin/python"
    own.parent.mkdir(parents=True)
    own.symlink_to(sys.executable)
    with_torch = Path(sys.executable).parent
    for folder, expected in ((Path("/usr/bin"), own), (with_torch, with_torch / "python3")):
        env = {"CONDA_PREFIX": str(folder.parent), "PATH": f"{folder}:/usr/bin:/bin"}
        job = slurm.sbatch(project / "slurm/train.sbatch", "/data", cwd=submit_folder, env=env)
        assert job.wait()["JobState"] == "COMPLETED", job.output()
        (rank,) = read_ranks(submit_folder)
        assert rank["python"] == str(expected)
