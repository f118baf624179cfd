"""The GPUs of trials that run at once: each slot has its own, also after a kill."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dataset.errors import UserError
from scripts.jobs import submit
from scripts.jobs.submit import require_gpus
from scripts.jobs.train_run import Place, TrainRun
from scripts.trials.run_search import run_search
from scripts.trials.store import read_trials
from tests.scripts.trials.searches import make_plan
from tests.scripts.trials.stand_in import StandIn, StartedJob
from train.ranks.gpus import count_devices


class Killed(BaseException):
    """Stands for a SIGKILL of the search: nothing of ours catches it."""


class SlotJobs(StandIn):
    """Notes the slot of each job; the search is killed when it has submitted a certain one."""

    killed_after = ""
    slots: dict[str, int]

    def submit(self, place: object, run: TrainRun, folder: Path, slot: int) -> StartedJob:
        job = super().submit(place, run, folder, slot)
        self.slots[run.name] = slot
        if run.name == self.killed_after:
            raise Killed
        return job


@pytest.mark.parametrize("killed_after", ["trial0001", ""])
def test_a_trial_that_outlives_a_killed_search_keeps_its_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_after: str
) -> None:
    """Killed when trial 1 was submitted, before its id was noted, or at the first pause."""

    def die(_seconds: float) -> None:
        raise Killed

    monkeypatch.chdir(tmp_path)
    folder, plan = tmp_path / "s", make_plan(trials=3, jobs=2)
    folder.mkdir()
    jobs = SlotJobs(tmp_path / "jobs")
    jobs.slots, jobs.killed_after = {}, killed_after
    jobs.install(monkeypatch)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(time, "sleep", die)
        run_search(folder, plan)
    assert jobs.slots == {"trial0000": 0, "trial0001": 1}
    while jobs.is_alive(read_trials(folder)[0].jobs[-1]):
        pass  # it trains an epoch each time, to its end
    assert run_search(folder, plan) == 0
    assert jobs.slots == {"trial0000": 0, "trial0001": 1, "trial0002": 0}


def test_only_gpus_are_counted(tmp_path: Path) -> None:
    """A stand-in for /dev: nothing is behind it."""
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert count_devices(tmp_path) == 3


def test_more_trials_at_once_than_gpus_are_refused_before_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "count_devices", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "s").mkdir()
    with pytest.raises(UserError, match=r"--jobs 3 with --gpus 1 needs 3 GPUs, here are 2; "):
        run_search(tmp_path / "s", make_plan(jobs=3))
    assert not (tmp_path / "s" / "search.json").exists()
    local = Place("local", uses_gpus=True)
    require_gpus(local, num_jobs=1, num_gpus=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(UserError, match=r"needs 2 GPUs, here is 1 \(CUDA_VISIBLE_DEVICES=1\); "):
        require_gpus(local, num_jobs=1, num_gpus=2)
    require_gpus(Place("local", uses_gpus=False), num_jobs=9, num_gpus=9)
    require_gpus(Place("slurm", uses_gpus=True), num_jobs=9, num_gpus=9)
    monkeypatch.setattr(submit, "count_devices", lambda: 0)  # then all is trained on the CPU
    require_gpus(local, num_jobs=9, num_gpus=9)
