"""The doctor ends with the next command: followed for real here, its shape elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.checks.next_step import find_next
from scripts.checks.place import Place, ask_for_gpus
from scripts.checks.supply_state import DataState, find_data, inspect_data
from tests.cluster.slurm.jobs import clean_env
from tests.conftest import ROOT
from train.ranks.launch import detect_launch

URL = "osdf:///ns/imagenet"
LAPTOP = Place(
    root=Path("/home/me/trainyard"),
    cwd=Path("/home/me/trainyard"),
    python="/home/me/trainyard/.venv/bin/python",
    env={},
    tools=frozenset(["make"]),
    launch=detect_launch({}),
)
FOLDER = DataState("/data/imagenet", num_images=1 << 15)
LOGIN = replace(LAPTOP, tools=frozenset(["make", "sbatch", "srun"]))
ACCESS_POINT = replace(LAPTOP, tools=frozenset(["make", "condor_submit"]))
STEP = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_CPUS_PER_TASK": "16",
}  # fmt: skip


def command(place: Place, *wrong: str) -> str:
    return find_next(place, set(wrong)).command


def ask(cwd: Path, *flags: str, bare: bool = False) -> dict[str, str]:
    """The step that the doctor proposes in a folder, where there is no scheduler."""
    words = [sys.executable, *(["-S"] if bare else []), str(ROOT / "scripts/doctor.py"), "--json"]
    env = clean_env({"PATH": "/nowhere"})
    done = subprocess.run(
        [*words, "--federation", "http://127.0.0.1:9", *flags],
        cwd=cwd, env=env, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    step: dict[str, str] = json.loads(done.stdout)["next"]
    return step


def follow(words: str, cwd: Path) -> None:
    """Runs a printed command as a user would who copies it into a shell."""
    done = subprocess.run(
        f"exec env {words}", shell=True, cwd=cwd, env=clean_env({"PATH": "/usr/bin:/bin"}),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.story
@pytest.mark.timeout(900)
def test_whoever_follows_the_doctor_on_a_laptop_gets_a_trained_model(tmp_path: Path) -> None:
    folder = tmp_path / "it's mine"
    folder.mkdir()
    here = replace(LAPTOP, root=ROOT, cwd=folder, python=sys.executable)
    follow(command(here), folder)
    made = find_data([folder])
    follow(command(replace(here, data=inspect_data(made))), folder)
    step = ask(folder)  # the doctor itself, who finds the data
    assert " -m train data -b 32 " in step["command"] and step["why"] == "try it on this CPU"
    follow(step["command"], folder)
    (record,) = folder.glob("run_results/cpu/*/run.json")
    run = json.loads(record.read_text())
    assert (run["status"], run["images_trained"]) == ("done", 480)


def test_a_small_folder_gets_a_batch_that_it_has_images_for(tmp_path: Path) -> None:
    for half in ("train", "val"):
        for wnid in ("n1", "n2"):
            (tmp_path / half / wnid).mkdir(parents=True)
            for n in range(3):
                (tmp_path / half / wnid / f"{n}.JPEG").touch()
    state = inspect_data(str(tmp_path))
    assert state.num_images == 6
    assert "-b 4 " in command(replace(LAPTOP, data=state)) + " "


def test_without_packages_the_environment_is_made_or_named(tmp_path: Path) -> None:
    assert command(LAPTOP, "packages") == "make setup"
    elsewhere = replace(LAPTOP, cwd=Path("/tmp"), setup_python="python3.12")
    assert command(elsewhere, "packages") == "make -C /home/me/trainyard setup PYTHON=python3.12"
    no_make = replace(LAPTOP, tools=frozenset())
    assert command(no_make, "packages") == "scripts/setup.sh .venv python3"
    in_conda = replace(LAPTOP, env={"CONDA_PREFIX": "/opt/c"}, python="/opt/c/bin/python")
    assert command(in_conda, "Python", "packages").endswith("-m pip install -r requirements.txt")
    too_old = replace(in_conda, has_wheels=False, setup_python="python3.12")
    assert command(too_old, "Python", "packages") == "make setup PYTHON=python3.12"
    in_base = replace(in_conda, env={"CONDA_PREFIX": "/opt/c", "CONDA_DEFAULT_ENV": "base"})
    assert command(in_base, "packages") == "make setup"
    made = tmp_path / ".venv/bin/python"
    made.parent.mkdir(parents=True)
    made.touch()
    system = replace(LAPTOP, root=tmp_path, cwd=tmp_path, python="/usr/bin/python3")
    there = replace(system, doctor_flags=("my data",))
    assert command(there, "packages") == ".venv/bin/python scripts/doctor.py 'my data'"
    if (ROOT / ".venv/bin/python").exists():
        bare = ask(tmp_path, bare=True)
        assert "packages" in bare["why"]


def test_what_is_wrong_is_fixed_first() -> None:
    place = replace(LOGIN, doctor_flags=("nowhere",))
    assert command(place, "data", "GPUs") == ".venv/bin/python scripts/doctor.py nowhere"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (FOLDER, "sbatch slurm/train.sbatch /data/imagenet -b 256"),
        (DataState(), "sbatch slurm/train.sbatch --dummy -b 256 --max-steps 100"),
        (DataState(URL), f"sbatch slurm/prepare.sbatch {URL} data"),
        (DataState(f"{URL}/a.tar"), f"sbatch slurm/prepare.sbatch {URL} data"),
        (
            DataState("d", (Path("d/t.tar"), Path("d/v.tar")), (Path("d/v.tar"),)),
            "sbatch slurm/prepare.sbatch d d",
        ),
        (
            DataState("d", (Path("d/t.tar"),), (Path("d/t.tar"),)),
            "sbatch slurm/train.sbatch d -b 256",
        ),
    ],
)
def test_a_login_node_submits(data: DataState, expected: str) -> None:
    assert command(replace(LOGIN, data=data)) == expected


def test_a_cluster_without_gpus_gets_none_asked_for() -> None:
    words = command(replace(LOGIN, data=FOLDER, has_cluster_gpus=False))
    assert words.startswith("sbatch --gpus-per-task=0 slurm/train.sbatch /data/imagenet -b 32")
    assert words.endswith("--device cpu")


@pytest.mark.parametrize(("answer", "expected"), [("(null)", False), ("gpu:a100:4", True)])
def test_slurm_says_whether_it_has_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, expected: bool
) -> None:
    (tmp_path / "sinfo").write_text(f"#!/bin/sh\necho '{answer}'\n")  # the real one has GPUs only
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert ask_for_gpus() is expected


def test_a_step_is_started_again_with_its_shape() -> None:
    place = replace(LOGIN, env=STEP, launch=detect_launch(STEP), data=FOLDER)
    shape = "srun --nodes=2 --ntasks=8 --cpus-per-task=16"
    words = command(replace(place, num_gpus=4))
    assert words == f"{shape} --gpus-per-task=1 .venv/bin/python -m train /data/imagenet -b 2048"
    on_cpus = command(place)
    assert on_cpus.startswith(f"{shape} .venv/bin/python -m train /data/imagenet -b 256 ")
    assert on_cpus.endswith("--device cpu")


def test_an_allocation_without_a_step_is_told_to_use_srun() -> None:
    env = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_CPUS_PER_TASK": "8"}
    place = replace(LOGIN, env=env, launch=None, doctor_flags=("DATA",))
    words = command(place, "launcher")
    assert words == "srun --cpus-per-task=8 .venv/bin/python scripts/doctor.py DATA"


def test_several_gpus_of_one_machine_get_a_rank_each() -> None:
    words = command(replace(LAPTOP, data=FOLDER, num_gpus=2))
    torchrun = ".venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 2"
    assert words == f"{torchrun} -m train /data/imagenet -b 512"
    one = command(replace(LAPTOP, data=FOLDER, num_gpus=1, cwd=Path("/data")))
    python = "/home/me/trainyard/.venv/bin/python"
    assert one == f"PYTHONPATH=/home/me/trainyard {python} -m train imagenet -b 256"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (DataState(), "DATA=dummy DATA_GB=1 EPOCHS=1 'TRAIN=--max-steps 50'"),
        (
            DataState(URL),
            f"DATA={URL}/ILSVRC2012_img_train.tar,{URL}/ILSVRC2012_img_val.tar DATA_GB=145",
        ),
        (
            DataState(f"{URL}/ILSVRC2012_img_train.tar"),
            f"DATA={URL}/ILSVRC2012_img_train.tar DATA_GB=138",
        ),
        (DataState("d", num_images=9), "DATA=/home/me/trainyard/d DATA_GB=0"),
    ],
)
def test_an_access_point_submits_one_job(data: DataState, expected: str) -> None:
    words = command(replace(ACCESS_POINT, data=data))
    python = "PYTHON=/home/me/trainyard/.venv/bin/python"
    assert words == f"condor_submit condor/train.sub {expected} {python}"


def test_in_a_slot_what_is_trained_goes_home() -> None:
    env = {"_CONDOR_JOB_AD": "ad"}
    place = replace(ACCESS_POINT, env=env, launch=detect_launch(env), data=FOLDER, num_gpus=1)
    assert command(place) == ".venv/bin/python -m train /data/imagenet -b 256 --output out"


def test_what_was_given_to_the_doctor_is_passed_on() -> None:
    given = replace(LAPTOP, data=DataState(URL), output="/scratch/a", federation="my.org")
    assert command(given).endswith("--device cpu --federation my.org --output /scratch/a")
    prepare = command(replace(given, tools=LOGIN.tools))
    assert prepare == f"sbatch slurm/prepare.sbatch {URL} data index --federation my.org"
