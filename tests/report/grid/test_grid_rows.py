"""A job's row: its times from the log, its outcome and fetch from the records that came back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from report.grid.eventlog import JobId, read_event_log
from report.grid.history import read_histories
from report.grid.jobs import SUCCESS, UNCHECKED, WRONG_OUTPUT
from report.grid.report import compute_slot_time, make_report
from report.grid.rows import GridJob, JobRecord, make_row, read_records
from tests.report.eventlogs import START, LogWriter

DONE = {"status": "done", "exit_code": 0, "images_trained": 100}


def make(folder: Path, writer: LogWriter, record: JobRecord | None = None) -> GridJob:
    path = folder / "job.log"
    path.write_text(writer.text)
    (history,) = read_histories(read_event_log(path).events)
    return make_row(history, record)


def evicted_once() -> LogWriter:
    """Input 20 s, 100 s of work, evicted; input 30 s, 200 s of work, output 5 s, done."""
    writer = LogWriter().transfer("Started input", 10).transfer("Finished input", 30)
    writer.execute(30, site="A").evict(130)
    writer.transfer("Started input", 200).transfer("Finished input", 230).execute(230, site="B")
    return writer.transfer("Started output", 430).transfer("Finished output", 435).terminate(436)


def test_the_times_of_a_job_that_was_evicted_once(tmp_path: Path) -> None:
    row = make(tmp_path, evicted_once())
    assert row.sites == ("A", "B")
    assert (row.transfer_last_s, row.transfer_retried_s, row.repeated_s) == (30, 20, 20)
    assert row.transfer_span_s == 220
    assert (row.compute_s, row.lost_compute_s, row.output_s) == (301, 100, 5)
    assert row.slot_busy_s == 120 + 236
    assert row.match_to_end_s == 426
    assert row.num_evictions == 1


def test_no_second_of_slot_time_is_lost_or_counted_twice(tmp_path: Path) -> None:
    fetches = ((START.timestamp() + 40, START.timestamp() + 90),
               (START.timestamp() + 240, START.timestamp() + 300))  # fmt: skip
    record = JobRecord(DONE, fetches)
    held = LogWriter("8.000.000").transfer("Started input", 5).stall(3605)
    held.transfer("Started input", 3700).transfer("Finished input", 3701).evict(3702)
    held.hold(3702, 13, 22)
    jobs = [make(tmp_path, evicted_once(), record), make(tmp_path, held)]
    total_s = sum(row.seconds for row in compute_slot_time(jobs))
    assert total_s == pytest.approx(sum(job.slot_busy_s or 0 for job in jobs))


def test_a_job_that_streamed_has_its_figures(tmp_path: Path) -> None:
    stream = {"bytes_fetched": 3_000_000_000, "network_wait_s": 5.0}
    run = DONE | {"attempts": [{"seconds": 10.0, "stream": stream}]}
    row = make(tmp_path, evicted_once(), JobRecord(run))
    assert row.stream is not None and row.stream.fetched_gb == 3.0
    assert make(tmp_path, evicted_once(), JobRecord(DONE)).stream is None


def test_in_job_fetch_is_no_compute_and_its_repetition_is_waste(tmp_path: Path) -> None:
    fetches = ((START.timestamp() + 40, START.timestamp() + 90),
               (START.timestamp() + 240, START.timestamp() + 300))  # fmt: skip
    row = make(tmp_path, evicted_once(), JobRecord(DONE, fetches))
    assert (row.fetch_s, row.refetch_s) == (110, 50)
    assert (row.compute_s, row.lost_compute_s) == (301 - 110, 50)
    waste = {r.cause: r.seconds for r in compute_slot_time([row]) if r.is_waste}
    assert waste == {
        "evictions: computing since the last checkpoint": 50,
        "evictions: input brought again": 20 + 50,
    }


@pytest.mark.parametrize(
    ("run", "outcome"),
    [
        (DONE, SUCCESS),
        (DONE | {"status": "failed", "exit_code": 3}, WRONG_OUTPUT),
        (DONE | {"status": "running", "exit_code": None}, WRONG_OUTPUT),
        (DONE | {"images_trained": 0}, WRONG_OUTPUT),
    ],
)
def test_exit_0_is_a_success_only_if_the_record_says_so(
    tmp_path: Path, run: dict[str, Any], outcome: str
) -> None:
    assert make(tmp_path, evicted_once(), JobRecord(run)).outcome == outcome


def test_without_a_record_the_output_is_unchecked_and_the_report_says_so(tmp_path: Path) -> None:
    row = make(tmp_path, evicted_once())
    assert row.outcome == UNCHECKED
    assert "1 job ended with exit 0" in make_report("t", [row]).remarks[0]


def test_records_are_found_by_cluster_and_proc(tmp_path: Path) -> None:
    scheduler = {"kind": "condor", "job_id": "12.3"}
    for name, value in (("a", scheduler), ("b", {"kind": "slurm", "job_id": "12"})):
        folder = tmp_path / name
        folder.mkdir()
        run = {"schema": 1, "run_id": name, "scheduler": value} | DONE
        (folder / "run.json").write_text(json.dumps(run))
    lines = [{"stage": "fetch", "start": 100.0, "seconds": 7.5}, {"stage": "train", "start": 110.0}]
    (tmp_path / "a" / "stages.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    records, _ = read_records([tmp_path])
    assert list(records) == [JobId(12, 3)]
    assert records[JobId(12, 3)].fetches == ((100.0, 107.5),)
