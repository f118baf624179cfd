"""scripts/search.py as a command, with the real trainer on made-up data."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dataset.fake.make import make_fake_imagenet
from report.search.trials import find_best
from scripts import search
from scripts.jobs.submit import is_local_alive
from scripts.trials.run_search import cancel_search
from scripts.trials.search_file import read_search
from scripts.trials.store import read_trials
from tests.mounts import mounted
from tests.scripts.commands import ROOT, fork_script, run_script
from tests.scripts.trials.pauses import Pause, choose_pauses
from tests.scripts.trials.searches import find_disagreements
from tests.scripts.trials.stand_in import StandIn
from train.records.record import read_epochs

pytestmark = pytest.mark.training

SCRIPT = ROOT / "scripts" / "search.py"
SPACE = "lr=log:0.001..1, label_smoothing=0..0.2"
EPOCHS = 2
TRAIN = (
    *("-a", "shufflenet_v2_x0_5", "-b", "8", "--image-size", "32", "--device", "cpu"),
    *("--threads", "1", "-j", "0", "--epochs", str(EPOCHS)),
)


def environment() -> dict[str, str]:
    """No launcher's variables: the search's own jobs set theirs."""
    names = ("SLURM_", "SUBMITIT_", "RANK", "WORLD_SIZE", "MASTER_")
    return {name: value for name, value in os.environ.items() if not name.startswith(names)}


def run(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return fork_script("search", *words, cwd=cwd, env=environment())


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A folder with a little data; no trial of a search in it outlives the test."""
    make_fake_imagenet(
        tmp_path / "data", classes=3, train_per_class=8, val_per_class=8, size=(40, 40)
    )
    yield tmp_path
    if (tmp_path / "s" / "search.json").exists():
        cancel_search(tmp_path / "s")


def test_bad_spaces_and_flags_are_one_line_before_anything_runs(tmp_path: Path) -> None:
    for words, says in {
        (
            "--space",
            "rate=0..1",
        ): "rate is no flag that can be searched; choose from allow_empty_classes",
        ("--space", "label_smoothing=0..2"): "--label-smoothing 2.0: must be in [0, 1)",
        ("--space", "lr=0..1", "--trials", "0"): "--trials 0: must be from 1",
        ("--space", "lr=0..1", "nowhere"): "no such file or folder: nowhere",
        (): "the following arguments are required: --space",
    }.items():
        done = run(*words, "--out", "s", "--", "--dummy", cwd=tmp_path)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert says in done.stderr
    refused = run(
        "--space", "lr=0..1", "--out", "s", "--", "--dummy", "--output", "x", cwd=tmp_path
    )
    assert refused.returncode == 2 and "each trial has a folder of its own" in refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_training_gets_no_search_beside_it(tmp_path: Path) -> None:
    for name in ("data", "a"):
        (tmp_path / name).mkdir()
    (tmp_path / "a/run.json").write_text("{}")
    done = run("data", "--space", "lr=0.1..1", "--out", "a", cwd=tmp_path)
    says = f"error: {tmp_path / 'a'} holds a training (run.json); give another --out\n"
    assert (done.returncode, done.stderr) == (2, says)
    assert os.listdir(tmp_path / "a") == ["run.json"]


def test_folders_that_are_no_search_are_named(tmp_path: Path) -> None:
    for command in ("status", "resume", "cancel"):
        done = run(command, tmp_path, cwd=tmp_path)
        assert done.returncode == 2 and "is not a search" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_without_optuna_one_line_says_how_to_get_it(tmp_path: Path) -> None:
    """It is hidden from this Python alone."""
    code = (
        "import sys, importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'optuna' else real(name, *a)\n"
        "import runpy; sys.argv = ['search.py', 'x']\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "has no optuna" in done.stderr and "pip install optuna" in done.stderr


def test_a_full_disk_is_one_line_and_the_search_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filled to the last block, in the folder of a search that has no trial yet.

    When there is room, the trainings are stood in for: theirs is another disk.
    """
    with mounted(tmp_path / "disk", "size=256k") as disk:
        words = ("--trials", "1", "--space", SPACE, "--out", disk / "s", "--", "--dummy", *TRAIN)
        (disk / "s").mkdir()
        (disk / "filler").write_bytes(bytes(4096))
        with open(disk / "filler", "ab", buffering=0) as file:
            while file.write(bytes(4096)) == 4096:
                if os.statvfs(disk).f_bavail == 0:
                    break
        done = run(*words, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert "No space left on device" in done.stderr and "Traceback" not in done.stderr
        assert "free some space and run the same command again" in done.stderr
        (disk / "filler").unlink()
        StandIn(tmp_path / "jobs").install(monkeypatch)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["search.py", *map(str, words)])
        assert search.main() == 0
        assert [trial.state for trial in read_trials(disk / "s").values()] == ["complete"]


def processes_of(folder: Path) -> list[str]:
    """The jobs of a search that run now."""
    trials = read_trials(folder).values()
    return [trial.jobs[-1] for trial in trials if trial.jobs and is_local_alive(trial.jobs[-1])]


def start(home: Path, *words: str, code: str = "") -> subprocess.Popen[bytes]:
    """The command under way; code: what Python runs in its place."""
    command = [sys.executable, *(["-c", code] if code else []), str(SCRIPT), *words]
    env = environment() | {"PYTHONPATH": str(ROOT)}
    with open(home / "log", "ab") as log:
        return subprocess.Popen(command, cwd=home, env=env, stdout=log, stderr=log)


def kill(process: subprocess.Popen[bytes]) -> None:
    """The end of a search alone."""
    process.kill()
    assert process.wait() == -signal.SIGKILL


def kill_all(process: subprocess.Popen[bytes], folder: Path) -> None:
    """The end of a machine: the search and its trials, at once."""
    kill(process)
    for job_id in processes_of(folder):
        with suppress(FileNotFoundError, ProcessLookupError):  # it came to its end just now
            children = Path(f"/proc/{job_id}/task/{job_id}/children").read_text().split()
            for pid in (*children, job_id):
                os.kill(int(pid), signal.SIGKILL)


def check_search(home: Path, num_trials: int) -> None:
    """No trial lost or twice; the best trial's command reproduces its accuracy to the bit."""
    folder, plan = home / "s", read_search(home / "s")
    assert find_disagreements(folder, plan) == []
    trials = list(read_trials(folder).values())
    assert [trial.state for trial in trials] == ["complete"] * num_trials
    for trial in trials:
        assert [epoch["epoch"] for epoch in read_epochs(folder / trial.name)] == [*range(EPOCHS)]
    best = find_best(trials, "acc1")
    assert best is not None
    assert [path.parent.name for path in folder.glob("trial*/ckpt")] == [best.name]
    log = (home / "log").read_text()
    command = next(line for line in log.splitlines() if line.startswith("    python -m train "))
    words = [sys.executable, *shlex.split(command)[1:]]
    done = subprocess.run(words, cwd=home, env=environment() | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0
    assert read_epochs(folder / "best")[-1]["val_acc1"] == best.value
    assert len(list((folder / "best").glob("*.pt"))) == 1


def test_one_real_trial_and_the_command_of_the_best(tmp_path: Path) -> None:
    words = ("--trials", "1", "--metric", "train_loss", "--space", SPACE, "--out", "s", "--")
    done = run_script(
        "search", *words, "--dummy", *TRAIN, "--max-steps", "1", cwd=tmp_path, env=environment()
    )
    assert done.returncode == 0, done.stderr
    assert "trial0000  complete train_loss" in done.stderr
    assert "python -m train --dummy -a shufflenet_v2_x0_5" in done.stdout
    assert "--output s/best --save-model" in done.stdout
    record = json.loads((tmp_path / "s" / "trial0000" / "run.json").read_text())
    assert record["attempts"][0]["launcher"] == "submitit"
    status = run("status", "s", "--format", "json", cwd=tmp_path)
    assert [row["state"] for row in json.loads(status.stdout)[0]["rows"]] == ["complete"]
    assert find_disagreements(tmp_path / "s", read_search(tmp_path / "s")) == []


# The command, whose trainings wait at their pauses.
PAUSED = """
import runpy, sys
from scripts.jobs import submit
from tests.scripts.trials.pauses import with_pauses
submit.make_task = with_pauses(submit.make_task)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def await_pause(
    process: subprocess.Popen[bytes], home: Path, pause: Pause, num_starts: int
) -> None:
    """Returns when the last of so many starts looks after its trials, and one has come so far."""
    log = home / "log"
    while log.read_text().count(": 12 trials\n") < num_starts or not pause.is_reached:
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_twelve_real_trials_killed_ten_times_lose_nothing(home: Path) -> None:
    """Every other time the trainings are killed, too."""
    words = ["data", "--trials", "12", "--jobs", "2", "--out", "s", "--space", SPACE, "--", *TRAIN]
    pauses = choose_pauses(home / "s", 10, 12, EPOCHS, random.Random(1))
    for num_starts, pause in enumerate(pauses, 1):
        process = start(home, *words, code=PAUSED)
        await_pause(process, home, pause, num_starts)
        kill_all(process, home / "s") if num_starts % 2 else kill(process)
        pause.release()
        words = ["resume", "s"]
    assert start(home, *words).wait(2000) == 0, (home / "log").read_text()
    check_search(home, 12)
