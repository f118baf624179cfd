"""A search of real trainings of a tiny network: killed, resumed, pruned, reproduced."""

from __future__ import annotations

import json
import random
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataset.fake.make import make_fake_imagenet
from report.search.trials import find_best
from scripts.trials import run_search as loop
from scripts.trials.results import best_command
from scripts.trials.run_search import run_search
from scripts.trials.store import read_trials
from tests.scripts.trials.forked_trainings import ForkedTrainings
from tests.scripts.trials.pauses import Pause, choose_pauses, wait_at_pauses
from tests.scripts.trials.searches import find_disagreements, make_plan
from tests.train import started_ranks as ranks
from train.records.record import read_epochs

pytestmark = pytest.mark.training

EPOCHS = 3


class Killed(BaseException):
    """Stands for a SIGKILL of the search: nothing of ours catches it."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    make_fake_imagenet(
        tmp_path / "data", classes=3, train_per_class=8, val_per_class=8, size=(40, 40)
    )
    monkeypatch.setattr(loop, "POLL_S", {"local": 0.02})
    (tmp_path / "s").mkdir()
    yield tmp_path / "s"
    ranks.end_leftovers()


def kill_at(
    pause: Pause, jobs: ForkedTrainings, monkeypatch: pytest.MonkeyPatch, moments: random.Random
) -> None:
    """The search ends at a look when the pause is reached, often with the trainings that run."""
    sleep = time.sleep

    def sleep_or_die(seconds: float) -> None:
        if pause.is_reached:
            for job_id in jobs.running if moments.random() < 0.7 else ():
                jobs.kill(job_id)
            pause.release()
            raise Killed
        sleep(seconds)

    monkeypatch.setattr(loop.time, "sleep", sleep_or_die)  # type: ignore[attr-defined]


def check_killed_search(
    folder: Path, monkeypatch: pytest.MonkeyPatch, num_trials: int, num_kills: int
) -> None:
    """No trial is lost or twice, and the best one's command reproduces its accuracy exactly."""
    jobs, moments = ForkedTrainings(wait_at_pauses), random.Random(num_trials)
    jobs.install(monkeypatch)
    plan = make_plan(
        data="../data", trials=num_trials, jobs=2, train_flags=("--epochs", str(EPOCHS))
    )
    for pause in choose_pauses(folder, num_kills, num_trials, EPOCHS, moments):
        with monkeypatch.context() as patch:
            kill_at(pause, jobs, patch, moments)
            with pytest.raises(Killed):
                run_search(folder, plan)
    assert run_search(folder, plan) == 0
    assert find_disagreements(folder, plan) == []
    trials = list(read_trials(folder).values())
    assert [trial.state for trial in trials] == ["complete"] * num_trials
    for trial in trials:
        assert len(read_epochs(folder / trial.name)) == EPOCHS
    best = find_best(trials, "acc1")
    assert best is not None
    assert [path.parent.name for path in folder.glob("*/ckpt")] == [best.name]
    argv = shlex.split(best_command(plan, trials, folder))[3:]
    ranks.run(argv, folder / "best.log").expect(0)
    assert read_epochs(folder / "best")[-1]["val_acc1"] == best.value


def test_a_search_that_is_killed_twice_loses_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_killed_search(folder, monkeypatch, num_trials=4, num_kills=2)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_twelve_trials_killed_ten_times_lose_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_killed_search(folder, monkeypatch, num_trials=12, num_kills=10)


def test_a_hopeless_trial_is_stopped_with_a_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer gets a SIGTERM and saves."""
    jobs = ForkedTrainings()
    jobs.install(monkeypatch)
    plan = make_plan(
        data="../data",
        trials=5,
        space="lr=log:0.0001..3",
        metric="val_loss",
        prune=True,
        keep_checkpoints=True,
        train_flags=("--epochs", "27"),
    )
    assert run_search(folder, plan) == 0
    trials = read_trials(folder).values()
    behind = [t for t in trials if t.state == "pruned"]
    assert behind and find_disagreements(folder, plan) == []
    for trial in behind:
        record = json.loads((folder / trial.name / "run.json").read_text())
        assert (record["status"], record["exit_code"]) == ("checkpointed", 85)
        assert list((folder / trial.name / "ckpt").glob("step-*.pt"))
        assert len(read_epochs(folder / trial.name)) < 27
