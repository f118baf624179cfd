"""The real torchrun around the real `python -m train`: a killed rank, a restart, the same end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dataset.errors import CHECKPOINTED
from tests.conftest import ROOT
from tests.train import started_ranks as ranks
from tests.train.outcomes import final_state, find_differences
from train.checkpoints.checkpoint import list_checkpoints
from train.records.record import read_run


def find_ranks(torchrun: psutil.Process) -> list[psutil.Process]:
    return [child for child in torchrun.children() if "train" in child.cmdline()]


@pytest.mark.story
@pytest.mark.timeout(900)
def test_torchrun_restarts_a_killed_rank_and_the_run_goes_on(images: Path, tmp_path: Path) -> None:
    out, plain = tmp_path / "out", tmp_path / "plain"
    argv = [*ranks.SMALL, str(images), "--epochs", "12"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--max-restarts", "1", "-m", "train", *argv]
    command += ["--output", str(out), "--checkpoint-minutes", "1e-9"]
    env = ranks.plain_environment() | {"OMP_NUM_THREADS": "1"}
    with open(tmp_path / "log", "w") as log:
        torchrun = psutil.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        found: list[psutil.Process] = []
        while not (found and list_checkpoints(out / "ckpt")):
            assert torchrun.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.01)
            found = found or find_ranks(torchrun)
        os.kill(found[-1].pid, signal.SIGKILL)
        assert torchrun.wait() == 0, (tmp_path / "log").read_text()
    finally:
        for process in [*torchrun.children(), torchrun] if torchrun.is_running() else []:
            process.kill()
    run = read_run(out)
    assert run["status"] == "done"
    assert [attempt["launcher"] for attempt in run["attempts"]] == ["torchrun", "torchrun"]
    ranks.run([*argv, "--output", str(plain)], tmp_path / "log1", 2).expect(0)
    assert find_differences(final_state(out), final_state(plain)) == []


@pytest.mark.story
@pytest.mark.timeout(900)
def test_ctrl_c_reaches_the_ranks_of_torchrun_and_they_save(tmp_path: Path) -> None:
    out, log_path = tmp_path / "out", tmp_path / "log"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "train", *ranks.SMALL, "--dummy"]
    env = ranks.plain_environment() | {"OMP_NUM_THREADS": "1"}
    with open(log_path, "w") as log:
        torchrun = psutil.Popen(
            [*command, "--output", str(out)],
            cwd=ROOT,
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while "step 2/" not in log_path.read_text():
            assert torchrun.poll() is None, log_path.read_text()
            time.sleep(0.01)
        os.killpg(torchrun.pid, signal.SIGINT)  # as a terminal does
        torchrun.wait()
    finally:
        for process in [*torchrun.children(), torchrun] if torchrun.is_running() else []:
            process.kill()
    run = read_run(out)
    assert (run["status"], run["exit_code"]) == ("checkpointed", CHECKPOINTED), log_path.read_text()
    assert run["attempts"][0]["reason"] == "SIGINT"
    assert final_state(out)["step"] >= 2
