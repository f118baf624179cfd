"""Stopping in time and together: what a rank votes, and that all ranks stop at one step."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dataset.errors import CHECKPOINTED, DONE
from tests.train import hooks
from tests.train import started_ranks as ranks
from tests.train.outcomes import final_state, find_differences, stopped_at, strip_times
from train.ranks import interrupt
from train.ranks.comm import Comm
from train.ranks.interrupt import GRACE_S, Interrupt, Vote
from train.ranks.launch import Launch
from train.records.record import read_epochs, read_run

pytestmark = pytest.mark.training

STEPS = 5  # of an epoch of the fake data at batch 8
NOW_S = 1_000_000.0


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = NOW_S


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "time", lambda: clock.now_s)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now_s)
    return clock


@pytest.fixture
def alone() -> Iterator[Interrupt]:
    watcher = watch(None)
    watcher.install()
    yield watcher
    watcher.uninstall()


def watch(deadline: float | None) -> Interrupt:
    return Interrupt(Comm(Launch("single", "a test")), deadline)


def send(*signals: signal.Signals) -> None:
    for number in signals:
        os.kill(os.getpid(), number)


# --- what one rank votes ----------------------------------------------------------------------

TERM, USR1, USR2 = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2
INT = signal.SIGINT


@pytest.mark.parametrize(
    ("signals", "vote", "reason"),
    [
        ((), Vote.GO_ON, ""),
        ((USR1,), Vote.REQUEUE, "SIGUSR1"),
        ((USR2,), Vote.REQUEUE, "SIGUSR2"),
        ((TERM,), Vote.EXIT, "SIGTERM"),
        ((USR1, TERM), Vote.EXIT, "SIGTERM"),  # the warning of a time limit, then scancel
        ((TERM, USR1), Vote.EXIT, "SIGTERM"),  # a cancelled job stays dead
        ((TERM, TERM), Vote.EXIT, "SIGTERM"),
        ((INT,), Vote.EXIT, "SIGINT"),
        ((USR1, INT), Vote.EXIT, "SIGINT"),
        ((INT, USR1), Vote.EXIT, "SIGINT"),
    ],
)
def test_signals_are_votes(
    alone: Interrupt, signals: tuple[signal.Signals, ...], vote: Vote, reason: str
) -> None:
    send(*signals)
    assert alone.agree(0.0, 0.0) is vote
    assert alone.reason == reason


def test_a_step_that_outlasts_the_grace_is_abandoned(alone: Interrupt, clock: Clock) -> None:
    send(USR1)
    assert alone.vote(3 * GRACE_S - 1, 0.0) is Vote.REQUEUE
    assert alone.vote(3 * GRACE_S + 1, 0.0) is Vote.REQUEUE_NOW
    send(TERM)
    assert alone.vote(GRACE_S - 1, 0.0) is Vote.EXIT
    assert alone.vote(GRACE_S + 1, 0.0) is Vote.EXIT_NOW
    clock.now_s += GRACE_S - 2  # what has gone by since the first signal counts
    assert alone.vote(3, 0.0) is Vote.EXIT_NOW


def test_a_time_limit_leaves_time_for_the_step_and_the_checkpoint(clock: Clock) -> None:
    watcher = watch(NOW_S + 3600)  # an hour: a margin of a minute
    assert watcher.vote(1.0, 5.0) is Vote.GO_ON
    clock.now_s = NOW_S + 3600 - 64
    assert watcher.vote(1.0, 5.0) is Vote.REQUEUE
    assert watcher.reason == "time limit"  # it is the cost of the checkpoint that made it late
    assert watcher.vote(70.0, 5.0) is Vote.REQUEUE_NOW
    assert watch(None).vote(1e9, 1e9) is Vote.GO_ON


@pytest.mark.parametrize(("limit_s", "margin_s"), [(60, 10), (300, 30), (86400, 60)])
def test_the_margin_is_a_tenth_of_the_job_within_bounds(
    clock: Clock, limit_s: float, margin_s: float
) -> None:
    watcher = watch(NOW_S + limit_s)
    clock.now_s = NOW_S + limit_s - margin_s - 1
    assert watcher.vote(0.0, 0.0) is Vote.GO_ON
    clock.now_s += 2
    assert watcher.vote(0.0, 0.0) is Vote.REQUEUE


def test_a_wanted_checkpoint_is_asked_for_once(alone: Interrupt) -> None:
    alone.wanted = Vote.SAVE
    assert [alone.vote(0.0, 0.0) for _ in range(2)] == [Vote.SAVE, Vote.GO_ON]
    alone.wanted = Vote.SAVE
    send(TERM)
    assert alone.vote(0.0, 0.0) is Vote.EXIT


def test_the_highest_vote_is_the_one_that_must_win() -> None:
    assert max(Vote.SAVE, Vote.REQUEUE) is Vote.REQUEUE
    assert max(Vote.REQUEUE, Vote.EXIT) is Vote.EXIT  # never a requeue against a SIGTERM
    assert max(Vote.REQUEUE_NOW, Vote.EXIT_NOW) is Vote.EXIT_NOW
    assert [vote for vote in Vote if vote.requeues] == [Vote.REQUEUE, Vote.REQUEUE_NOW]
    assert [vote for vote in Vote if not vote.stops] == [Vote.GO_ON, Vote.SAVE]
    assert [vote for vote in Vote if vote.abandons_step] == [Vote.REQUEUE_NOW, Vote.EXIT_NOW]


def test_handlers_are_given_back() -> None:
    before = [signal.getsignal(number) for number in (TERM, USR1, USR2, INT)]
    watcher = watch(None)
    watcher.install()
    assert all(signal.getsignal(n) == watcher._on_signal for n in (TERM, USR1, USR2, INT))
    watcher.uninstall()
    assert [signal.getsignal(number) for number in (TERM, USR1, USR2, INT)] == before


# --- what all ranks do ------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 2])
def test_a_signal_to_one_rank_stops_all_at_one_step(
    images: Path, tmp_path: Path, rank: int
) -> None:
    out = tmp_path / "out"
    argv = [str(images), "-b", "9", "--epochs", "2", "--output", str(out)]
    hook = partial(hooks.at_step, rank, 1, partial(hooks.signal_myself, USR1))
    ranks.run(argv, tmp_path / "log", 3, hook=hook).expect(CHECKPOINTED)
    assert stopped_at(out) == 4  # voted before the third step, heard before the fourth
    (attempt,) = read_run(out)["attempts"]
    assert attempt["reason"] == "SIGUSR1"
    ranks.run(argv, tmp_path / "log1", 3).expect(DONE)
    assert [a["reason"] for a in read_run(out)["attempts"]] == ["SIGUSR1", "done"]


def slurm_variables(_rank: int, path: Path, **more: str) -> dict[str, str]:
    """A step of one task; its end is known, so that nobody asks squeue."""
    names = {"PROCID": "0", "LOCALID": "0", "NODEID": "0", "STEP_ID": "0", "STEP_NUM_TASKS": "1"}
    job = {"JOB_ID": "42", "JOB_END_TIME": str(int(time.time()) + 9999)} | names | more
    return {f"SLURM_{name}": value for name, value in job.items()} | {"PATH": str(path)}


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    """What bin/scontrol writes down: it stands for SLURM's own, which has its tests elsewhere."""
    asked = tmp_path / "asked"
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(
        f"#!{sys.executable}\nimport sys\nopen({str(asked)!r}, 'w').write(repr(sys.argv[1:]))"
    )
    scontrol.chmod(0o755)
    return asked


@pytest.mark.parametrize(("number", "requeues"), [(USR1, True), (USR2, True), (TERM, False)])
def test_a_warning_requeues_the_task_by_its_own_id_and_a_cancel_does_not(
    images: Path, tmp_path: Path, asked: Path, number: signal.Signals, requeues: bool
) -> None:
    task: dict[str, Any] = {"ARRAY_JOB_ID": "40", "ARRAY_TASK_ID": "3"}
    env = partial(slurm_variables, path=tmp_path / "bin", **task)
    hook = partial(hooks.at_step, 0, 1, partial(hooks.signal_myself, number))
    argv = [str(images), "--output", str(tmp_path / "out")]
    job = ranks.run(argv, tmp_path / "log", env=env, hook=hook).expect(CHECKPOINTED)
    assert asked.exists() == requeues
    if requeues:
        assert asked.read_text() == "['requeue', '40_3']"
        assert "job 40_3 is requeued" in job.log
    assert stopped_at(tmp_path / "out") == 3


@pytest.mark.parametrize(("cancelled", "requeues"), [((), True), ((0,), False), ((1,), False)])
def test_a_job_that_is_cancelled_while_its_last_checkpoint_is_written_stays_dead(
    images: Path, tmp_path: Path, asked: Path, cancelled: tuple[int, ...], requeues: bool
) -> None:
    """USR1 first, so that all ranks agree to requeue; then SIGTERM to one of them."""
    job = {"SLURM_JOB_ID": "42", "SLURM_JOB_END_TIME": str(int(time.time()) + 9999)}
    path, port = str(tmp_path / "bin"), ranks.find_free_port()
    cancel = [partial(hooks.signal_rank, tmp_path, rank, TERM) for rank in cancelled]
    hook = partial(
        hooks.all_of,
        partial(hooks.note_pid, tmp_path),
        partial(hooks.at_step, 0, 1, partial(hooks.signal_myself, USR1)),
        partial(hooks.before, "torch", "save", partial(hooks.all_of, *cancel)),
    )
    ranks.run(
        [str(images), "--microbatch", "4", "--output", str(tmp_path / "out")],
        tmp_path / "log",
        2,
        env=lambda rank: ranks.rank_variables(rank, 2, port) | job | {"PATH": path},
        hook=hook,
    ).expect(CHECKPOINTED)
    assert asked.exists() == requeues
    assert stopped_at(tmp_path / "out") >= 2
    (attempt,) = read_run(tmp_path / "out")["attempts"]
    assert attempt["reason"] == ("SIGTERM" if cancelled else "SIGUSR1")


def test_without_scontrol_a_clear_line_and_exit_85(images: Path, tmp_path: Path) -> None:
    """The trainer runs in a container that has no SLURM."""
    env = partial(slurm_variables, path=tmp_path / "nothing")
    hook = partial(hooks.at_step, 0, 1, partial(hooks.signal_myself, USR1))
    argv = [str(images), "--output", str(tmp_path / "out")]
    job = ranks.run(argv, tmp_path / "log", env=env, hook=hook).expect(CHECKPOINTED)
    assert "cannot requeue" in job.log and "start the same command again" in job.log
    assert "Traceback" not in job.log


def test_a_time_limit_stops_a_run_by_itself(images: Path, tmp_path: Path) -> None:
    deadline = str(time.time() + interrupt.MIN_MARGIN_S + 0.5)
    argv = [str(images), "--deadline", deadline, "--output", str(tmp_path / "out")]
    ranks.run(argv, tmp_path / "log", 2).expect(CHECKPOINTED)
    assert read_run(tmp_path / "out")["attempts"][0]["reason"] == "time limit"


def test_in_an_htcondor_slot_a_checkpoint_is_an_exit(images: Path, tmp_path: Path) -> None:
    ad = tmp_path / "job.ad"
    ad.write_text("SuccessCheckpointExitCode = 85\nClusterId = 7\n")
    out = tmp_path / "out"
    argv = [str(images), "--epochs", "1", "--output", str(out), "--checkpoint-minutes", "1e-9"]
    slot = partial(condor_variables, ad=ad)
    steps = []
    for number in range(STEPS + 1):  # a step each, and then the validation
        job = ranks.run(argv, tmp_path / f"log{number}", env=slot).expect(CHECKPOINTED, DONE)
        steps.append(final_state(out)["step"])
        if job.codes == [DONE]:
            break
    assert job.codes == [DONE]
    assert steps == [1, 2, 3, 4, 5, 5]
    reasons = [attempt["reason"] for attempt in read_run(out)["attempts"]]
    assert set(reasons[:-1]) == {"checkpoint interval"}
    plain = [str(images), "--epochs", "1", "--output", str(tmp_path / "plain")]
    ranks.run(plain, tmp_path / "logp").expect(DONE)
    assert find_differences(final_state(out), final_state(tmp_path / "plain")) == []


def condor_variables(_rank: int, ad: Path) -> dict[str, str]:
    return {"_CONDOR_JOB_AD": str(ad)}


@pytest.mark.parametrize("world", [1, 2])
def test_an_abandoned_step_is_undone_and_done_again(
    images: Path, tmp_path: Path, world: int
) -> None:
    """The step is longer than the grace period; the last whole one is saved."""
    argv = [str(images), "--epochs", "1", "--microbatch", "1", "--image-size", "64"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ranks.run([*argv, "--output", str(whole)], tmp_path / "log0", world).expect(DONE)
    argv += ["--output", str(parts)]
    hook = partial(
        hooks.all_of,
        partial(hooks.set_value, "train.ranks.interrupt", "GRACE_S", 0.0),
        partial(hooks.at_step, 0, 2, hooks.terminate_myself),
    )
    ranks.run(argv, tmp_path / "log1", world, hook=hook).expect(CHECKPOINTED)
    assert stopped_at(parts) == 2
    ranks.run(argv, tmp_path / "log2", world).expect(DONE)
    assert find_differences(final_state(parts), final_state(whole)) == []
    assert strip_times(read_epochs(parts)) == strip_times(read_epochs(whole))


def test_a_first_step_that_is_too_long_is_known_to_be(images: Path, tmp_path: Path) -> None:
    """The estimate must not start near zero: three more microbatches of 0.3 s do not fit 0.6 s."""
    hook = partial(
        hooks.all_of,
        partial(hooks.set_value, "train.ranks.interrupt", "GRACE_S", 0.6),
        partial(hooks.before, "train.step", "derive_key", partial(time.sleep, 0.3)),
        partial(hooks.at_step, 0, 0, hooks.terminate_myself),
    )
    argv = [str(images), "--microbatch", "2", "--output", str(tmp_path / "out")]
    ranks.run(argv, tmp_path / "log", hook=hook).expect(CHECKPOINTED)
    assert stopped_at(tmp_path / "out") == 0


def test_a_signal_while_a_checkpoint_is_written(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = [str(images), "--epochs", "1", "--output", str(out)]
    hook = partial(hooks.before, "torch", "save", hooks.terminate_myself)
    saving = [*argv, "--checkpoint-minutes", "1e-9"]
    ranks.run(saving, tmp_path / "log", hook=hook).expect(CHECKPOINTED)
    assert 1 <= stopped_at(out) < STEPS
    ranks.run(argv, tmp_path / "log1").expect(DONE)


def test_a_signal_that_nobody_hears_any_more_does_not_disturb_the_end(
    images: Path, tmp_path: Path
) -> None:
    """Without a validation the vote of the last step is still under way when the run is done."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "train").symlink_to(images / "train")
    argv = [str(data), "--epochs", "1", "--output", str(tmp_path / "out")]
    hook = partial(hooks.at_step, 1, STEPS - 1, hooks.terminate_myself)
    ranks.run(argv, tmp_path / "log", 2, hook=hook).expect(DONE)
    assert read_run(tmp_path / "out")["status"] == "done"


def test_a_signal_to_all_processes_of_a_job_spares_the_loaders_workers(
    images: Path, tmp_path: Path
) -> None:
    """SLURM signals every process of the step; a worker that died would make it a crash."""
    out = tmp_path / "out"
    argv = [str(images), "-j", "2", "--decoder", "pil", "--epochs", "900", "--output", str(out)]
    job = ranks.start(argv, tmp_path / "log", 2)
    job.wait_for_log("epoch 1 step 2/")
    for process in job.processes:
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGTERM)
    job.send(signal.SIGTERM)
    job.expect(CHECKPOINTED)
    step = stopped_at(out)
    assert step >= 2
    more = [*argv, "--max-steps", str(step + 1)]
    ranks.run(more, tmp_path / "log1", 2).expect(DONE)
