"""A search on a SLURM whose commands fail now and then; SLURM and the trainings are stood in for.

tests/cluster/slurm runs a search on the real one.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from submitit.core.utils import FailedJobError
from submitit.slurm.slurm import SlurmExecutor

from dataset.errors import CommandError, PassingError, UserError
from scripts.jobs.submit import adopt_job, cancel_slurm, log_folder, submit_slurm
from scripts.jobs.train_run import Place, SlurmOptions, TrainRun
from scripts.trials import run_search as loop
from scripts.trials import trial_jobs
from scripts.trials.run_search import run_search
from scripts.trials.store import read_trials
from tests.scripts.trials.searches import make_plan
from tests.scripts.trials.stand_in import StandIn

RUN = TrainRun(name="trial0000", group="s-trial0000", num_gpus=1, num_nodes=1, argv=())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s").mkdir()
    return tmp_path / "s"


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = StandIn(tmp_path / "jobs")
    found.install(monkeypatch)
    return found


def refuse(
    jobs: StandIn, patch: pytest.MonkeyPatch, refused: Sequence[int], error: CommandError
) -> list[int]:
    """sbatch refuses some of its calls, by number; returns the numbers of those so far."""
    calls: list[int] = []

    def submit_or_refuse(*words: Any) -> list[str]:
        calls.append(len(calls))
        if calls[-1] in refused:
            raise error
        return jobs.submit_slurm(*words)

    patch.setattr(trial_jobs, "submit_slurm", submit_or_refuse)
    return calls


@pytest.mark.parametrize("num_jobs", [1, 2])
def test_jobs_that_are_refused_in_the_middle_are_submitted_later(
    folder: Path, jobs: StandIn, monkeypatch: pytest.MonkeyPatch, num_jobs: int
) -> None:
    refuse(jobs, monkeypatch, range(1, 9), UserError("sbatch refused: QOSMaxSubmitJobPerUserLimit"))
    assert run_search(folder, make_plan(cluster="slurm", trials=3, jobs=num_jobs)) == 0
    assert jobs.started == [f"trial{n:04d}" for n in range(3)]


def test_a_refusal_of_the_first_job_ends_the_search_at_once(
    folder: Path, jobs: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = refuse(jobs, monkeypatch, range(99), UserError("sbatch refused: invalid partition"))
    with pytest.raises(UserError, match="invalid partition"):
        run_search(folder, make_plan(cluster="slurm"))
    assert len(calls) == 1


def test_a_controller_that_does_not_answer_is_asked_again(
    folder: Path, jobs: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(jobs, monkeypatch, range(3), PassingError("sbatch refused: Socket timed out"))
    assert run_search(folder, make_plan(cluster="slurm", trials=2)) == 0
    assert len(jobs.started) == 2


def test_refusals_without_end_end_the_search(
    folder: Path,
    jobs: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = refuse(jobs, monkeypatch, range(1, 999), UserError("sbatch refused: account expired"))
    with pytest.raises(UserError, match="account expired"):
        run_search(folder, make_plan(cluster="slurm", jobs=2))
    assert len(calls) > trial_jobs.MAX_REFUSALS and caplog.text.count("account expired") == 1
    assert [trial.state for trial in read_trials(folder).values()] == ["complete", "running"]


def test_hopeless_trials_are_cancelled_when_scancel_works_again(
    tmp_path: Path, folder: Path, jobs: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def fail_at_first(cluster: str, job_ids: Sequence[str]) -> None:
        if job_ids:
            asked.append(list(job_ids))
            if len(asked) < 3:
                raise PassingError("scancel failed")
        jobs.cancel(cluster, job_ids)

    monkeypatch.setattr(loop, "cancel_jobs", fail_at_first)
    flags = ("--dummy", "-b", "8", "--epochs", "9")
    assert (
        run_search(folder, make_plan(cluster="slurm", trials=6, prune=True, train_flags=flags)) == 0
    )
    assert asked[0] == asked[1] == asked[2]
    pruned = [trial for trial in read_trials(folder).values() if trial.state == "pruned"]
    records = [json.loads((folder / t.name / "run.json").read_text()) for t in pruned]
    assert {record["status"] for record in records} == {"checkpointed"}


@pytest.mark.parametrize(
    ("per_node", "num_gpus", "words"),
    [(0, 1, "--gpus-per-node 0: must be at least 1"), (4, 5, "5 GPUs do not fill nodes of 4")],
)
def test_trials_that_do_not_fill_their_nodes_are_refused(
    per_node: int, num_gpus: int, words: str
) -> None:
    slurm = SlurmOptions(gpus_per_node=per_node)
    with pytest.raises(UserError, match=words):
        make_plan(cluster="slurm", gpus=num_gpus, slurm=slurm)
    make_plan(cluster="local", gpus=num_gpus, slurm=slurm)


def answer(patch: pytest.MonkeyPatch, code: int, stdout: str = "", stderr: str = "") -> None:
    """What SLURM's next commands answer."""
    done = subprocess.CompletedProcess([], code, stdout, stderr)
    patch.setattr(subprocess, "run", lambda *_, **__: done)


def test_a_failing_scancel_is_a_passing_error(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, 1, stderr="scancel: error: Socket timed out\n")
    with pytest.raises(PassingError, match=r"scancel failed: .*Socket timed out; try again later"):
        cancel_slurm(["5"])

    def hang(command: list[str], **_: object) -> None:
        raise subprocess.TimeoutExpired(command, 60)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(PassingError, match="scancel does not answer"):
        cancel_slurm(["5"])


def test_the_job_of_a_killed_search_is_found_by_its_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by its name alone, which a search in another folder may share."""
    folder = tmp_path / "my searches" / "s"
    ours = log_folder(folder, RUN) / ".submission_file_b.sh"
    answer(monkeypatch, 0, f"11 /other/s/logs/s-trial0000/.submission_file_a.sh\n12 {ours}\n")
    assert adopt_job("slurm", RUN, folder) == "12"
    assert adopt_job("slurm", RUN, tmp_path / "s") is None


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("Batch job submission failed: Socket timed out on send/recv operation", PassingError),
        ("Unable to contact slurm controller (connect failure)", PassingError),
        ("Batch job submission failed: Invalid partition name specified", UserError),
    ],
)
def test_a_refusal_passes_if_the_controller_was_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, kind: type[CommandError]
) -> None:
    def submit(*_: object) -> None:
        raise FailedJobError(f"sbatch: error: {reason}\n")

    monkeypatch.setattr(shutil, "which", lambda _: "/bin/sbatch")
    monkeypatch.setattr(SlurmExecutor, "submit", submit)
    with pytest.raises(kind, match="sbatch refused trial0000: sbatch: error: "):
        submit_slurm(Place("slurm", uses_gpus=False), [RUN], tmp_path)
