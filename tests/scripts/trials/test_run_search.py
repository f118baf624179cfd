"""A search from its first trial to its best, killed at any moment; the trainings are stood in for.

tests/scripts/test_search.py runs the command with the real trainer.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from dataset.errors import CommandError, PassingError, run_command
from report.search.trials import find_best, read_trial
from scripts.jobs import state
from scripts.trials import run_search as loop
from scripts.trials import trial_jobs
from scripts.trials.journal import JOURNAL
from scripts.trials.results import best_command
from scripts.trials.run_search import ask_search, cancel_search, run_search
from scripts.trials.search_file import SearchPlan, extend_search, read_search, write_search
from scripts.trials.store import Store, read_trials
from tests.mounts import mounted
from tests.scripts.trials.searches import find_disagreements, make_plan
from tests.scripts.trials.stand_in import Fate, StandIn, accuracy
from train.config import TrainConfig, parse_config

TRIALS = 6


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s").mkdir()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "s"


def stand_in(tmp_path: Path, patch: pytest.MonkeyPatch, fate: Fate | None = None) -> StandIn:
    jobs = StandIn(tmp_path / "jobs", fate)
    jobs.install(patch)
    return jobs


def test_every_trial_runs_once_and_the_best_is_printed(
    tmp_path: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    jobs, plan = stand_in(tmp_path, monkeypatch), make_plan()
    assert run_search(folder, plan) == 0
    assert jobs.started == [f"trial{n:04d}" for n in range(TRIALS)]
    trials = list(read_trials(folder).values())
    assert {trial.state for trial in trials} == {"complete"}
    best = find_best(trials, "acc1")
    assert best is not None and best.value == max(trial.value or 0.0 for trial in trials)
    command = best_command(plan, trials, folder)
    assert command in capsys.readouterr().out
    config = parse_config(command.split()[3:])
    assert accuracy(config, config.epochs) == best.value and config.output == Path("s/best")
    assert find_disagreements(folder, plan) == []


def test_a_second_start_runs_nothing_and_more_trials_continue(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, plan = stand_in(tmp_path, monkeypatch), make_plan(trials=3)
    run_search(folder, plan)
    before = read_trials(folder)
    assert run_search(folder, plan) == 0
    assert read_trials(folder) == before and len(jobs.started) == 3
    assert run_search(folder, extend_search(plan, make_plan(trials=5), folder, True)) == 0
    assert {n: t for n, t in read_trials(folder).items() if n < 3} == before
    assert len(jobs.started) == 5


def test_only_so_many_run_at_once(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch)
    most = 0
    find_states = state.find_states

    def count_active(*words: Any) -> list[state.RunState]:
        nonlocal most
        found = find_states(*words)
        most = max(most, sum(one.is_active for one in found))
        return found

    monkeypatch.setattr(loop, "find_states", count_active)
    assert run_search(folder, make_plan(trials=9, jobs=3)) == 0
    assert most == 3


def test_hopeless_trials_are_stopped_and_only_the_best_keeps_its_checkpoint(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch)
    plan = make_plan(trials=12, prune=True, train_flags=("--dummy", "-b", "8", "--epochs", "9"))
    assert run_search(folder, plan) == 0
    trials = read_trials(folder)
    pruned = [trial for trial in trials.values() if trial.state == "pruned"]
    assert pruned and all(max(trial.reports) in (1, 3) for trial in pruned)
    best = find_best(list(trials.values()), "acc1")
    assert best is not None and best.value == max(t.value or 0.0 for t in trials.values())
    assert [path.parent.name for path in folder.glob("*/ckpt")] == [best.name]
    records = [json.loads((folder / t.name / "run.json").read_text()) for t in pruned]
    assert {record["status"] for record in records} == {"checkpointed"}
    assert find_disagreements(folder, plan) == []


def test_checkpoints_can_be_kept(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch)
    run_search(folder, make_plan(trials=3, keep_checkpoints=True))
    assert len(list(folder.glob("*/ckpt"))) == 3


def test_a_loss_is_minimised(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch)
    run_search(folder, make_plan(trials=3, metric="train_loss"))
    trials = list(read_trials(folder).values())
    best = find_best(trials, "train_loss")
    assert best is not None and best.value == min(trial.value or 0.0 for trial in trials)


def fate_of(*fates: str) -> Fate:
    """The fates of the first trials, by their numbers; the rest is done."""

    def fate(config: TrainConfig) -> str:
        number = int(str(config.output)[-4:])
        return fates[number] if number < len(fates) else "done"

    return fate


def test_a_failed_trial_is_shown_and_replaced_on_resume(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in(tmp_path, monkeypatch, fate_of("done", "failed"))
    caplog.set_level("INFO")
    plan = make_plan(trials=4)
    assert run_search(folder, plan) == 1
    assert "log of trial0001" in caplog.text
    assert "3 of 4 trials have a result; run the others with: search.py resume" in caplog.text
    assert run_search(folder, plan) == 0
    states = [trial.state for trial in read_trials(folder).values()]
    assert states == ["complete", "failed", "complete", "complete", "complete"]


def test_all_failing_ends_after_three_and_shows_the_first_log(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = stand_in(tmp_path, monkeypatch, lambda _: "no record")
    assert run_search(folder, make_plan(trials=20)) == 2
    assert len(jobs.started) == 3
    assert "log of trial0000" in caplog.text and "log of trial0001" not in caplog.text
    assert "0 of 20 trials have a result" in caplog.text


def test_a_trial_that_was_running_at_a_kill_is_no_result(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a search that was killed in its first trial still ends when all fail."""
    jobs, plan = stand_in(tmp_path, monkeypatch, lambda _: "failed"), make_plan(trials=20)
    Store(folder, plan, is_sole=True).ask(0)
    assert run_search(folder, plan) == 1
    assert len(jobs.started) == 3


def test_a_trial_that_diverged_is_a_result(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(trials=3)
    stand_in(tmp_path, monkeypatch, fate_of("diverged"))
    assert run_search(folder, plan) == 0
    first = read_trials(folder)[0]
    assert (first.state, first.value, first.note) == ("pruned", None, "diverged")
    assert find_disagreements(folder, plan) == []


def test_all_that_diverged_leave_nothing_to_choose(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, lambda _: "diverged")
    assert run_search(folder, make_plan(trials=4)) == 4


def test_a_trial_that_is_killed_goes_on_and_not_for_ever(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = stand_in(tmp_path, monkeypatch, fate_of("done", "killed"))
    assert run_search(folder, make_plan(trials=3)) == 75
    assert jobs.started.count("trial0001") == 3
    assert read_trials(folder)[1].state == "running"
    stand_in(tmp_path, monkeypatch)
    assert run_search(folder, make_plan(trials=3)) == 0
    assert len(read_trials(folder)) == 3


def test_a_metric_that_no_trial_wrote_ends_the_search_and_can_be_changed(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = stand_in(tmp_path, monkeypatch)
    plan = make_plan(trials=3, metric="f1_score")
    with pytest.raises(
        CommandError, match=r"no epoch of trial0000 has the metric f1_score; .*val_acc1"
    ):
        run_search(folder, plan)
    assert read_trials(folder)[0].state == "running"
    wanted = make_plan(trials=3, metric="loss")
    assert run_search(folder, extend_search(plan, wanted, folder, False)) == 0
    assert [trial.state for trial in read_trials(folder).values()] == ["complete"] * 3
    assert jobs.started.count("trial0000") == 2  # stopped with a checkpoint, then went on
    assert find_disagreements(folder, wanted) == []
    with pytest.raises(CommandError, match="holds another search"):
        extend_search(wanted, make_plan(trials=3, metric="acc1"), folder, True)


def test_cancel_ends_a_search_that_waits_and_resume_goes_on(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = stand_in(tmp_path, monkeypatch)
    plan, looks = make_plan(trials=4, jobs=2), 0

    def cancel_at_second(_seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            assert cancel_search(folder) == 2

    monkeypatch.setattr(time, "sleep", cancel_at_second)
    assert run_search(folder, plan) == 75
    table = ask_search(folder)
    assert "stopped: has a checkpoint and can be resumed" in str(table)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert run_search(folder, plan) == 0
    assert sorted(set(jobs.started)) == [f"trial{n:04d}" for n in range(4)]
    assert len(jobs.started) == 6


def test_a_scheduler_that_does_not_answer_at_a_start_is_asked_again(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, asked = stand_in(tmp_path, monkeypatch), 0

    def answer_late(*words: Any) -> str | None:
        nonlocal asked
        asked += 1
        if asked % 5:
            raise PassingError("squeue does not answer; ask again later")
        return jobs.adopt(*words)

    monkeypatch.setattr(trial_jobs, "adopt_job", answer_late)
    assert run_search(folder, make_plan(trials=2)) == 0
    assert jobs.started == ["trial0000", "trial0001"]


def test_a_full_disk_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk has room for ever more of the search, and at last for all of it."""
    jobs, plan = stand_in(tmp_path, monkeypatch), make_plan(trials=3)
    codes = []
    with mounted(tmp_path / "disk", "size=160k") as disk:
        (disk / "s").mkdir()
        for num_blocks in range(1, 24, 3):
            with open(disk / "filler", "wb", buffering=0) as filler:
                while os.statvfs(disk).f_bavail > num_blocks:
                    filler.write(bytes(4096))
            codes.append(run_command(lambda: run_search(disk / "s", plan)))
            (disk / "filler").unlink()
        assert (codes[0], codes[-1]) == (2, 0) and set(codes) == {0, 2}
        assert find_disagreements(disk / "s", plan) == []
        trials = read_trials(disk / "s")
        assert [trial.state for trial in trials.values()] == ["complete"] * 3
    assert sorted(set(jobs.started)) == [trial.name for trial in trials.values()]
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == codes.count(2)
    assert all("No space left on device" in line for line in errors)


def test_a_search_is_run_by_one_process(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch)

    def start_another(_seconds: float) -> None:
        with pytest.raises(CommandError, match="is being run by another process"):
            run_search(folder, make_plan())
        monkeypatch.setattr(time, "sleep", lambda _: None)

    monkeypatch.setattr(time, "sleep", start_another)
    assert run_search(folder, make_plan()) == 0


def test_the_plan_is_read_as_it_was_written(folder: Path) -> None:
    plan = make_plan(prune=True, jobs=3)
    write_search(folder, plan)
    assert read_search(folder) == plan


@pytest.mark.parametrize(
    "changes", [{"cluster": "moon"}, {"trials": "6"}, {"space": 3}, {"train_flags": [1]}, {"x": 1}]
)
def test_a_damaged_plan_is_one_line(folder: Path, changes: dict[str, object]) -> None:
    write_search(folder, make_plan())
    record = json.loads((folder / "search.json").read_text())
    record["plan"] |= changes
    (folder / "search.json").write_text(json.dumps(record))
    with pytest.raises(CommandError, match=r"search\.json"):
        read_search(folder)


def kill_at(number: int, tears: bool) -> None:
    """From now on this process is killed at its so-manieth fsync, perhaps with a torn journal."""
    fsync, left = os.fsync, number

    def fsync_or_die(fd: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            path = Path(f"/proc/self/fd/{fd}").readlink()
            if tears and path.name == JOURNAL:
                os.truncate(path, max(0, path.stat().st_size - 7))
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(fd)

    os.fsync = fsync_or_die  # type: ignore[assignment]


def run_and_kill(folder: Path, plan: SearchPlan, number: int, tears: bool) -> bool:
    """Whether the search was killed, and did not come to its end before."""
    child = os.fork()
    if child == 0:
        try:
            kill_at(number, tears)
            os._exit(run_search(folder, plan))
        except BaseException:
            os._exit(99)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def check_killed_searches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: SearchPlan, every: int
) -> int:
    """Kills a search at its n-th write, then at later ones until it ends; for every n-th n."""
    quiet = tmp_path / "quiet"
    quiet.mkdir()
    StandIn(tmp_path / "quiet-jobs").install(monkeypatch)
    run_search(quiet, plan)
    undisturbed = [trial.params for trial in read_trials(quiet).values()]
    number, num_kills = 1, 0
    while True:
        folder = tmp_path / f"kill{number}"
        folder.mkdir()
        jobs = StandIn(tmp_path / f"jobs{number}")
        jobs.install(monkeypatch)
        was_killed = run_and_kill(folder, plan, number, tears=number % 2 == 0)
        if not was_killed:
            return num_kills
        num_kills += 1
        while run_and_kill(folder, plan, 11 + number % 13, tears=number % 3 == 0):
            num_kills += 1
        assert find_disagreements(folder, plan) == []
        trials = list(read_trials(folder).values())
        assert [trial.params for trial in trials] == undisturbed
        assert {trial.state for trial in trials} <= {"complete", "pruned"}
        starts = jobs.started
        assert sorted(set(starts)) == [trial.name for trial in trials]
        assert len(starts) == len(trials), f"killed at {number}: a trial was started twice"
        assert [read_trial(folder / trial.name) for trial in trials] == trials
        number += every


def test_killed_at_many_moments_no_trial_is_lost_or_run_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_killed_searches(tmp_path, monkeypatch, make_plan(trials=3), every=17) > 5


@pytest.mark.soak
@pytest.mark.parametrize("prune", [False, True])
@pytest.mark.timeout(1800)
def test_killed_at_every_moment_no_trial_is_lost_or_run_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prune: bool
) -> None:
    plan = make_plan(trials=4, prune=prune)
    assert check_killed_searches(tmp_path, monkeypatch, plan, every=1) > 100
