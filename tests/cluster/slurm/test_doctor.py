"""The doctor is right under every launcher, real ones all."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.cluster.mpi import MPI_ENV
from tests.cluster.slurm.jobs import run
from tests.conftest import ROOT

# Without site-packages: what is looked at here needs no torch, which takes seconds to import.
DOCTOR = [sys.executable, "-S", str(ROOT / "scripts/doctor.py"), "--json"]
DOCTOR += ["--federation", "http://127.0.0.1:9"]


def read_launches(output: str) -> list[dict[str, Any]]:
    """The launch that each rank found, by rank."""
    records = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return sorted((record["launch"] for record in records), key=lambda launch: launch["rank"])


@pytest.mark.slurm
def test_inside_srun_each_rank_knows_its_place(slurm: ModuleType, tmp_path: Path) -> None:
    # A file for each task: srun cuts long lines of its tasks into pieces that mix.
    where = ["--nodes=2", "--ntasks-per-node=2", "--ntasks=4", f"--output={tmp_path}/%t.json"]
    slurm.srun(*where, *DOCTOR)
    launches = read_launches("".join(path.read_text() for path in tmp_path.iterdir()))
    assert [launch["rank"] for launch in launches] == [0, 1, 2, 3]
    assert [launch["local_rank"] for launch in launches] == [0, 1, 0, 1]
    assert [launch["node_rank"] for launch in launches] == [0, 0, 1, 1]
    assert {launch["launcher"] for launch in launches} == {"srun"}
    assert {launch["num_nodes"] for launch in launches} == {2}
    assert {launch["master_host"] for launch in launches} == {"n1"}
    assert len({launch["token"] for launch in launches}) == 1


@pytest.mark.slurm
def test_inside_srun_rank_0_reports_and_nothing_is_wrong(slurm: ModuleType) -> None:
    """With all packages: also the names of SLURM's nodes, unknown to any DNS, are resolved."""
    doctor = [sys.executable, str(ROOT / "scripts/doctor.py")]
    done = slurm.srun("--nodes=2", "--cpus-per-task=16", *doctor)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("launcher    srun, because SLURM_STEP_ID=0 with 2 tasks") == 1
    assert "rendezvous  n1 is 127.0.0.1" in done.stdout
    assert "SLURM_CPUS_PER_TASK 16" in done.stdout
    assert "so no login node" in done.stdout
    assert "rank 1 of 2, local rank 0 of 1, node 1 of 2, on" in done.stdout
    assert done.stdout.count("\n    srun --nodes=2 --ntasks=2 --cpus-per-task=16 ") == 1


@pytest.mark.slurm
def test_on_a_login_node_the_command_that_it_prints_prepares_the_data(
    slurm: ModuleType, tiny_data: Path, tmp_path: Path
) -> None:
    names = ("ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "valprep.sh")
    (tmp_path / "data").mkdir()
    for name in names:
        shutil.copy(tiny_data / name, tmp_path / "data")
    doctor = [sys.executable, *DOCTOR[2:]]  # counting images needs numpy
    done = run(*doctor, cwd=tmp_path)
    command = json.loads(done.stdout)["next"]["command"]
    assert command == f"sbatch {ROOT}/slurm/prepare.sbatch data data"
    done = run("bash", "-c", command, env={"SBATCH_WAIT": "1"}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all((tmp_path / "data" / f"{name}.index").exists() for name in names[:2])


@pytest.mark.slurm
def test_inside_sbatch_without_srun_it_says_to_use_srun(slurm: ModuleType, tmp_path: Path) -> None:
    script = tmp_path / "bare.sbatch"
    doctor = " ".join(DOCTOR).replace(" --json", "")
    script.write_text(f"#!/bin/bash\n#SBATCH --ntasks=4 --time=10\n{doctor}\n")
    job = slurm.sbatch(f"--output={tmp_path}/log", script)
    assert job.wait()["ExitCode"] == "2:0"
    assert "wrong: SLURM_NTASKS=4 but this process is not in a step" in job.output()
    assert "start it with srun" in job.output()


@pytest.mark.slurm
def test_given_gpus_are_shown_and_missing_ones_are_wrong(slurm: ModuleType) -> None:
    """The GPUs of this SLURM are device files without a device behind them."""
    doctor = [sys.executable, str(ROOT / "scripts/doctor.py"), "--json"]
    done = slurm.srun("--gres=gpu:4", *doctor)
    assert done.returncode == 2
    gpus = {f["topic"]: f for f in json.loads(done.stdout)["findings"]}["GPUs"]
    assert "CUDA_VISIBLE_DEVICES=0,1,2,3" in gpus["text"]
    assert "--device cpu" in gpus["problem"]


def test_inside_torchrun_each_rank_knows_its_place(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python"]
    # A file a rank: on one pipe their long lines may mix. The doctor, who has no torch here, ends
    # with 2, at which torchrun would stop the other rank before it has spoken.
    patient = ["sh", "-c", '"$@" || true', "sh", *DOCTOR]
    done = run(*torchrun, f"--log-dir={tmp_path}", "--redirects=1", *patient)
    outputs = [file.read_text() for file in sorted(tmp_path.rglob("stdout.log"))]
    assert len(outputs) == 2, done.stderr
    launches = read_launches("".join(outputs))
    assert [launch["rank"] for launch in launches] == [0, 1]
    assert {launch["launcher"] for launch in launches} == {"torchrun"}
    assert {launch["local_world_size"] for launch in launches} == {2}


@pytest.mark.mpi
def test_inside_mpirun_each_rank_knows_its_place(mpirun: str, tmp_path: Path) -> None:
    # A file for each rank: mpirun, too, cuts long lines into pieces that mix.
    done = run(mpirun, "--output-filename", str(tmp_path), "-n", "2", *DOCTOR, env=MPI_ENV)
    launches = read_launches("".join(path.read_text() for path in tmp_path.rglob("stdout")))
    assert [launch["rank"] for launch in launches] == [0, 1], done.stderr
    assert {launch["launcher"] for launch in launches} == {"openmpi"}
    assert [launch["local_rank"] for launch in launches] == [0, 1]


def test_in_a_plain_shell_it_is_one_process() -> None:
    (launch,) = read_launches(run(*DOCTOR).stdout)
    assert (launch["launcher"], launch["world_size"]) == ("single", 1)
