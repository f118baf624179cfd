"""What became of a job, told from the events that HTCondor writes in each case."""

from __future__ import annotations

from pathlib import Path

import pytest

from report.grid.eventlog import read_event_log
from report.grid.history import read_histories
from report.grid.jobs import (
    HELD,
    PREEMPTED_COMPUTE,
    PREEMPTED_TRANSFER,
    REMOVED,
    RUNNING,
    UNCHECKED,
    WAITING,
    WRONG_OUTPUT,
    JobHistory,
)
from tests.report.eventlogs import EVERY_KIND, START, LogWriter


def tell(folder: Path, writer: LogWriter) -> JobHistory:
    path = folder / "job.log"
    path.write_text(writer.text)
    (history,) = read_histories(read_event_log(path).events)
    return history


def with_input(at_s: float = 10, seconds: float = 20) -> LogWriter:
    """A job whose input came."""
    writer = LogWriter().transfer("Started input", at_s)
    return writer.transfer("Finished input", at_s + seconds)


def test_a_job_that_runs_through(tmp_path: Path) -> None:
    writer = with_input().execute(30).transfer("Started output", 100)
    history = tell(tmp_path, writer.transfer("Finished output", 104).terminate(105))
    (activation,) = history.activations
    assert (history.outcome, history.exit_code) == (UNCHECKED, 0)
    assert (activation.site, activation.slot, activation.gpu) == (
        "SITE-A", "slot1_1@host1", "NVIDIA A100",
    )  # fmt: skip
    assert [(t.seconds, t.succeeded, t.site) for t in activation.transfers] == [
        (20, True, "SITE-A")
    ]
    assert (activation.seconds, activation.output_s, activation.execute_span_s) == (95, 4, 71)
    assert activation.lost_span is None


def test_finished_may_stand_after_execute(tmp_path: Path) -> None:
    writer = LogWriter().transfer("Started input", 10).execute(30).transfer("Finished input", 31)
    (activation,) = tell(tmp_path, writer.terminate(50)).activations
    assert [(t.seconds, t.succeeded) for t in activation.transfers] == [(21, True)]


def test_a_transfer_counts_as_done_only_if_the_job_then_executes(tmp_path: Path) -> None:
    """A plugin that fails writes Finished too, then 021, 004 and 012, and no 001."""
    writer = with_input(10, 2).message(13, "Transfer input files failure").evict(13)
    history = tell(tmp_path, writer.hold(13, 13, 22, "404 page not found"))
    (activation,) = history.activations
    assert [(t.seconds, t.succeeded) for t in activation.transfers] == [(2, False)]
    assert (history.outcome, history.phase) == (HELD, "transfer")
    assert [(h.code, h.subcode, h.phase) for h in history.holds] == [(13, 22, "transfer")]
    assert history.detail == "hold code 13.22 in transfer"


def test_a_stall_is_an_attempt_that_the_watchdog_ended(tmp_path: Path) -> None:
    writer = LogWriter().transfer("Started input", 0).stall(3600)
    writer.transfer("Started input", 3700).transfer("Finished input", 3800).execute(3800)
    history = tell(tmp_path, writer.terminate(4000))
    transfers = [t for a in history.activations for t in a.transfers]
    assert [(t.seconds, t.stalled, t.succeeded) for t in transfers] == [
        (3600, True, False), (100, False, True),
    ]  # fmt: skip
    assert history.outcome == UNCHECKED


def test_a_message_of_the_starter_is_no_failure(tmp_path: Path) -> None:
    """The OSPool's pilots report the container's start with a 021."""
    writer = with_input().message(30, "PREPARE_JOB succeeded", "Message").execute(31)
    history = tell(tmp_path, writer.terminate(60))
    assert history.outcome == UNCHECKED
    assert [t.stalled for t in history.activations[0].transfers] == [False]


def test_eviction_in_compute_loses_what_no_checkpoint_kept(tmp_path: Path) -> None:
    writer = with_input().execute(30).transfer("Started output", 100)
    writer.transfer("Finished output", 104).evict(150)
    history = tell(tmp_path, writer)
    assert history.outcome == PREEMPTED_COMPUTE
    begin, end = history.activations[0].lost_span or (0, 0)
    assert (begin, end) == (START.timestamp() + 104, START.timestamp() + 150)


def test_without_a_checkpoint_all_of_it_is_lost(tmp_path: Path) -> None:
    history = tell(tmp_path, with_input().execute(30).evict(150))
    begin, end = history.activations[0].lost_span or (0, 0)
    assert end - begin == 120


def test_an_output_transfer_that_was_cut_off_keeps_nothing(tmp_path: Path) -> None:
    history = tell(tmp_path, with_input().execute(30).transfer("Started output", 100).evict(150))
    (activation,) = history.activations
    assert (activation.output_s, activation.last_checkpoint_s) == (50, None)


def test_an_output_that_could_not_be_sent_keeps_nothing_although_040_says_finished(
    tmp_path: Path,
) -> None:
    writer = with_input().execute(30).transfer("Started output", 50)
    writer.transfer("Finished output", 55).transfer("Started output", 100)
    writer.transfer("Finished output", 104)
    writer.message(104, "STARTER at 127.0.0.1 failed to send file(s) to <127.0.0.1:1>").evict(105)
    history = tell(tmp_path, writer.hold(105, 12, 2))
    assert history.activations[0].last_checkpoint_s == START.timestamp() + 55


def test_eviction_in_transfer(tmp_path: Path) -> None:
    history = tell(tmp_path, LogWriter().queue_input(5).transfer("Started input", 10).evict(99))
    assert (history.outcome, history.activations[0].start_s) == (
        PREEMPTED_TRANSFER, START.timestamp() + 5,
    )  # fmt: skip


def test_an_exit_85_restarts_without_a_new_execute_event(tmp_path: Path) -> None:
    writer = with_input().execute(30)
    for at in (100, 200):
        writer.transfer("Started output", at).transfer("Finished output", at + 10)
    writer.transfer("Started output", 300).transfer("Finished output", 305)
    history = tell(tmp_path, writer.terminate(306, time_execute_s=90))
    (activation,) = history.activations
    assert activation.execute_span_s == 306 - 30 - 25  # TimeExecute has only the last segment


def test_hold_code_47_ends_the_activation_without_a_004(tmp_path: Path) -> None:
    reason = "The job exceeded allowed execute duration of 20:00:00"
    history = tell(tmp_path, with_input().execute(30).hold(72030, 47, 0, reason))
    assert (history.outcome, history.detail) == (HELD, "hold code 47.0 in compute")
    assert history.activations[0].ended_by == "held"
    assert history.activations[0].execute_span_s == 72000


def test_a_released_job_waits_and_then_runs(tmp_path: Path) -> None:
    writer = with_input(10, 1).evict(12).hold(12, 13, 22).release(312)
    assert tell(tmp_path, writer).outcome == WAITING
    writer.transfer("Started input", 320).transfer("Finished input", 330).execute(331)
    history = tell(tmp_path, writer.terminate(400))
    assert (history.outcome, len(history.holds)) == (UNCHECKED, 1)


def test_a_disconnect_that_heals_keeps_the_activation(tmp_path: Path) -> None:
    writer = with_input().execute(30)
    writer.add(22, EVERY_KIND[22], 40).add(23, EVERY_KIND[23], 60)
    history = tell(tmp_path, writer.terminate(100))
    assert (len(history.activations), history.num_disconnects) == (1, 1)


@pytest.mark.parametrize("kind", [7, 24])
def test_a_lost_connection_or_shadow_is_a_preemption(tmp_path: Path, kind: int) -> None:
    history = tell(tmp_path, with_input().execute(30).add(kind, EVERY_KIND[kind], 90))
    assert (history.outcome, history.activations[0].ended_by) == (PREEMPTED_COMPUTE, "lost")


def test_a_retried_exit_waits_for_its_next_start(tmp_path: Path) -> None:
    history = tell(tmp_path, with_input().execute(30).requeue(60, 75))
    assert (history.outcome, history.detail) == (WAITING, "exit 75, retried")
    assert history.activations[0].ended_by == "requeued"


@pytest.mark.parametrize(("code", "detail"), [(3, "exit 3"), (1, "exit 1")])
def test_an_exit_that_is_not_0_is_a_wrong_output(tmp_path: Path, code: int, detail: str) -> None:
    history = tell(tmp_path, with_input().execute(30).terminate(60, code))
    assert (history.outcome, history.detail, history.exit_code) == (WRONG_OUTPUT, detail, code)


def test_a_signal_is_a_wrong_output(tmp_path: Path) -> None:
    history = tell(tmp_path, with_input().execute(30).kill(60, 9))
    assert (history.outcome, history.detail) == (WRONG_OUTPUT, "killed by signal 9")


def test_removed_running_and_waiting_jobs(tmp_path: Path) -> None:
    assert tell(tmp_path, with_input().execute(30).remove(40)).outcome == REMOVED
    running = tell(tmp_path, with_input().execute(30))
    assert (running.outcome, running.detail) == (RUNNING, "in compute")
    assert tell(tmp_path, LogWriter()).outcome == WAITING


def test_an_activation_that_vanished_is_closed_by_the_next(tmp_path: Path) -> None:
    """A schedd that crashed wrote no 004."""
    writer = with_input().execute(30).transfer("Started input", 200)
    history = tell(tmp_path, writer.transfer("Finished input", 210).execute(211).terminate(300))
    assert [a.ended_by for a in history.activations] == ["lost", "terminated"]


def test_without_a_resource_name_the_host_stands_for_the_site(tmp_path: Path) -> None:
    history = tell(tmp_path, with_input().execute(30, site="").terminate(60))
    assert history.activations[0].site == "host1"


def test_interleaved_jobs_are_told_apart(tmp_path: Path) -> None:
    one, two = LogWriter("7.000.000").execute(5), LogWriter("7.001.000").execute(6)
    path = tmp_path / "both.log"
    path.write_text(one.text + two.text + LogWriter("6.000.000").text)
    histories = read_histories(read_event_log(path).events)
    assert [str(h.job) for h in histories] == ["6.000.000", "7.000.000", "7.001.000"]
