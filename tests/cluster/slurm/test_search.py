"""A search on the real SLURM: four trials at once, one requeued, its watcher too, to the page."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from report.search.trials import find_best
from scripts.jobs.submit import adopt_job
from scripts.trials.search_file import read_search, trial_run
from scripts.trials.store import read_trials
from tests.cluster.slurm.jobs import Job, run, wait_until
from tests.cluster.slurm.layout import CONF
from tests.conftest import ROOT
from tests.scripts.trials.searches import find_disagreements
from train.records.record import read_epochs, read_run

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1500)]

SEARCH = (sys.executable, ROOT / "scripts" / "search.py")
EPOCHS = 4
TRAIN = [
    *("-a", "shufflenet_v2_x0_5", "-b", "8", "--image-size", "32", "--device", "cpu"),
    *("--threads", "1", "-j", "0", "-p", "1", "--epochs", str(EPOCHS)),
]
# Of a node's 64 CPUs: no two trials fit on one, and the job that watches them fits beside.
ONE_A_NODE = ("--cpus-per-task", "48", "--mem-per-cpu", "100M", "--time", "30")
WAIT_S = 600.0
SPACE = "lr=log:0.0001..0.001"  # with 0.013 some validation losses were not finite


def trial_jobs(folder: Path) -> dict[int, Job]:
    """The jobs of the trials so far, by number."""
    trials = read_trials(folder) if (folder / "search.json").exists() else {}
    return {number: Job(trial.jobs[-1]) for number, trial in trials.items() if trial.jobs}


def nodes_in_use(folder: Path) -> set[str]:
    """Where trials run now."""
    shown = [job.show() for job in trial_jobs(folder).values()]
    return {job["NodeList"] for job in shown if job["JobState"] == "RUNNING"}


def test_of_four_trials_at_once_one_is_requeued_and_the_chain_goes_on_to_the_page(
    slurm: ModuleType, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `scontrol requeue`; for a job, SLURM's preemption by requeue is the same path."""
    monkeypatch.setenv("SLURM_CONF", str(CONF))
    folder = tmp_path / "s"
    words = ["--trials", "4", "--jobs", "4", "--cluster", "slurm", "--chain", *ONE_A_NODE]
    words += ["--best-epochs", "1", "--space", SPACE, "--out", str(folder)]
    done = run(*SEARCH, tiny_data, *words, "--", *TRAIN, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    chain = [Job(line.split()[-1]) for line in done.stderr.splitlines() if "  job " in line]
    try:
        wait_until(lambda: len(nodes_in_use(folder)) == 4, "four trials on four nodes", WAIT_S)
        number, requeued = next(iter(trial_jobs(folder).items()))
        # A job whose id was not yet noted when its search was killed is found by its script.
        lost = trial_run(read_search(folder), read_trials(folder)[number], folder)
        assert adopt_job("slurm", lost, folder) == requeued.id
        assert adopt_job("slurm", lost, tmp_path) is None
        output = folder / f"trial{number:04d}"
        wait_until((output / "run.json").exists, "it trains", WAIT_S)
        for job in (requeued, chain[0]):
            job.requeue()
        for job in (requeued, chain[0]):
            job.await_restart(WAIT_S)
        for job in chain:
            assert job.wait(WAIT_S)["JobState"] == "COMPLETED", job.output()
    finally:
        for job in chain:
            job.cancel()
        run(*SEARCH, "cancel", folder)
    check_search(folder, number)
    assert "best acc1 of 4 trials" in (folder / "report.html").read_text()


def check_search(folder: Path, requeued: int) -> None:
    """No trial was lost or trained twice; the best was trained again and evaluated."""
    assert find_disagreements(folder, read_search(folder)) == []
    trials = read_trials(folder)
    assert [trial.state for trial in trials.values()] == ["complete"] * 4
    assert [len(trial.jobs) for trial in trials.values()] == [1] * 4
    for trial in trials.values():
        assert [epoch["epoch"] for epoch in read_epochs(folder / trial.name)] == [*range(EPOCHS)]
        reasons = [attempt["reason"] for attempt in read_run(folder / trial.name)["attempts"]]
        assert reasons == (["SIGTERM", "done"] if trial.number == requeued else ["done"])
    best = find_best(list(trials.values()), "acc1")
    assert best is not None
    config = read_run(folder / "best")["config"]
    assert (config["lr"], config["epochs"]) == (best.params["lr"], 1)
    assert (folder / "best/predictions.csv").exists()
