"""Ctrl-C: the first saves and stops, the second ends at once; before the start it is one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from dataset.errors import CHECKPOINTED, DONE, INTERRUPTED, USER_MISTAKE, UserError
from tests.conftest import ROOT
from tests.mounts import mounted
from tests.train import hooks
from tests.train import started_ranks as ranks
from tests.train.outcomes import EVERY_STEP, final_state
from train.checkpoints.checkpoint import list_checkpoints
from train.records.record import read_run
from train.run_folder import check_output

pytestmark = pytest.mark.training


def ignore_interrupts() -> None:
    """As a shell starts what it puts into the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def only_output(folder: Path) -> Path:
    (out,) = folder.glob("run_results/*/*")
    return out.relative_to(folder)


@pytest.mark.parametrize("world", [1, 2])
def test_ctrl_c_saves_and_says_how_the_run_is_continued(
    images: Path, tmp_path: Path, world: int
) -> None:
    """Without --output: the folder is named, and --resume last finds it."""
    argv = [str(images), "--max-steps", "9"]
    there = partial(os.chdir, tmp_path)
    interrupt = partial(hooks.at_step, 0, 2, partial(hooks.signal_myself, signal.SIGINT))
    hook = partial(hooks.all_of, there, interrupt)
    job = ranks.run(argv, tmp_path / "log0", world, hook=hook).expect(CHECKPOINTED)
    out = only_output(tmp_path)
    run = read_run(tmp_path / out)
    assert (run["status"], run["exit_code"]) == ("checkpointed", CHECKPOINTED)
    assert run["attempts"][0]["reason"] == "SIGINT"
    step = final_state(tmp_path / out)["step"]
    assert step >= 3 and f"stopped at step {step} of 9 with a checkpoint" in job.log
    assert f"start the same command again with --output {out}, or with --resume last" in job.log
    assert "Traceback" not in job.log
    resumed = ranks.run([*argv, "--resume", "last"], tmp_path / "log1", world, hook=there)
    assert f"continuing from step {step} " in resumed.expect(DONE).log
    assert only_output(tmp_path) == out and len(read_run(tmp_path / out)["attempts"]) == 2


def test_a_new_run_names_its_folder_and_the_unfinished_run_of_the_same_command(
    images: Path, tmp_path: Path
) -> None:
    argv = [str(images), "--max-steps", "2"]
    there = partial(os.chdir, tmp_path)
    job = ranks.run([*argv, "--resume", "last"], tmp_path / "log0", hook=there)
    assert "no unfinished run of this command" in job.expect(USER_MISTAKE).log
    kill = partial(hooks.before, "train.saving", "save_state_dict", hooks.kill_myself)
    hook = partial(hooks.all_of, there, kill)
    ranks.run([*argv, "--save-model"], tmp_path / "log1", hook=hook).expect(-signal.SIGKILL)
    first = only_output(tmp_path)
    job = ranks.run([*argv, "--seed", "1"], tmp_path / "log2", hook=there).expect(DONE)
    assert "unfinished run" not in job.log  # it is another command
    job = ranks.run(argv, tmp_path / "log3", hook=there).expect(DONE)
    assert f"{first} is an unfinished run of this command: --resume last" in job.log
    assert "a new run, since no --output is given; --output run_results/cpu/" in job.log
    job = ranks.run([*argv, "--resume", "last"], tmp_path / "log4", hook=there).expect(DONE)
    assert read_run(tmp_path / first)["status"] == "done"


def test_a_second_ctrl_c_ends_a_rank_whose_main_thread_is_busy(
    images: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    hook = partial(
        hooks.all_of,
        partial(hooks.set_value, "train.ranks.interrupt", "SAME_PRESS_S", 0.0),
        partial(hooks.at_step, 0, 4, partial(time.sleep, 1000.0)),
    )
    argv = [str(images), "--output", str(out), *EVERY_STEP]
    job = ranks.start(argv, tmp_path / "log", hook=hook)
    job.wait_for_log("step 4/")
    job.send(signal.SIGINT)
    job.wait_for_log("Ctrl-C: saves a checkpoint and stops")
    job.send(signal.SIGINT)
    job.expect(INTERRUPTED)
    assert job.log.count("error: interrupted twice") == 1 and "Traceback" not in job.log
    assert final_state(out)["step"] >= 1


def test_one_press_that_arrives_twice_is_one(images: Path, tmp_path: Path) -> None:
    """The terminal sends it to all ranks, and a launcher passes it on."""
    out = tmp_path / "out"
    hook = partial(hooks.set_value, "train.ranks.interrupt", "SAME_PRESS_S", 1000.0)
    argv = [str(images), "--output", str(out), "--epochs", "9000", *EVERY_STEP]
    job = ranks.start(argv, tmp_path / "log", 2, hook=hook)
    job.wait_for(lambda: list_checkpoints(out / "ckpt"), "a checkpoint")
    for _ in range(3):
        job.send(signal.SIGINT)
    job.expect(CHECKPOINTED)
    assert job.log.count("Ctrl-C: saves") == 1 and "Traceback" not in job.log


def test_a_run_in_the_background_does_not_hear_ctrl_c(images: Path, tmp_path: Path) -> None:
    interrupt = partial(hooks.at_step, 0, 1, partial(hooks.signal_myself, signal.SIGINT))
    hook = partial(hooks.all_of, ignore_interrupts, interrupt)
    argv = [str(images), "--max-steps", "3", "--output", str(tmp_path / "out")]
    ranks.run(argv, tmp_path / "log", hook=hook).expect(DONE)


# --- before torch is imported -----------------------------------------------------------------


@pytest.fixture
def slow_torch(tmp_path: Path) -> Path:
    """A torch whose import is noticed and does not end: the real one takes seconds."""
    package = tmp_path / "packages" / "torch"
    package.mkdir(parents=True)
    ready = tmp_path / "importing"
    text = f"import pathlib, time\npathlib.Path({str(ready)!r}).touch()\ntime.sleep(1000)\n"
    (package / "__init__.py").write_text(text)
    return ready


def start_trainer(slow_torch: Path, *argv: str) -> subprocess.Popen[str]:
    folder = slow_torch.parent
    env = ranks.plain_environment() | {"PYTHONPATH": f"{folder / 'packages'}:{ROOT}"}
    command = [sys.executable, "-m", "train", *argv]
    return subprocess.Popen(command, cwd=folder, env=env, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> str:
    """What it said, once it has ended; one that does not end is killed."""
    try:
        return process.communicate(timeout=280)[1]
    finally:
        process.kill()


def test_ctrl_c_while_torch_is_imported_is_one_line(slow_torch: Path) -> None:
    process = start_trainer(slow_torch, "--dummy")
    while not slow_torch.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    text = end(process)
    assert text == "error: interrupted; run the same command again\n"
    assert process.returncode == INTERRUPTED


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--no-such-flag"], "--no-such-flag"),
        (["nowhere"], "no such data: nowhere"),
        (["--dummy", "--lr", "-1"], "--lr -1.0: must be 0 or more"),
        (["--dummy", "--resume", "packages"], "packages is a folder"),
        (["--dummy", "--resume", "x.pt"], "no such checkpoint: x.pt"),
        (["--dummy", "--weights", "x.pt"], "no such weights: x.pt"),
        (["--dummy", "--output", "a-file"], "a-file is a file"),
        (["--dummy", "--output", "a-file/below"], "a-file is a file"),
        (["--dummy", "--output", "with-ckpt"], "with-ckpt/ckpt is a file"),
        (["--dummy", "--resume", "last", "--output", "x"], "leave out --output"),
    ],
)
def test_a_mistake_is_found_before_torch_is_imported(
    slow_torch: Path, argv: list[str], words: str
) -> None:
    folder = slow_torch.parent
    (folder / "a-file").touch()
    (folder / "with-ckpt").mkdir()
    (folder / "with-ckpt" / "ckpt").touch()
    process = start_trainer(slow_torch, *argv)
    text = end(process)
    assert process.returncode == USER_MISTAKE
    assert words in text and text.count("\n") == 1
    assert not slow_torch.exists()


def test_a_disk_that_cannot_be_written_is_no_place_for_a_run(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "ro,size=64k") as folder:
        with pytest.raises(UserError, match="cannot be written to"):
            check_output(folder / "new" / "run")
        argv = ["--dummy", "--max-steps", "1", "--output", str(folder)]
        job = ranks.run(argv, tmp_path / "log", 2).expect(USER_MISTAKE)
    assert "Read-only file system" in job.log and "Traceback" not in job.log
