"""What the reports say of runs that trained while their tar arrived, and of all others: nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from report.grid.jobs import SUCCESS
from report.grid.report import make_report
from report.grid.rows import GridJob
from report.grid.tables import make_job_table
from report.page import Contents, build_page
from report.runs import load_runs
from report.streams import read_stream, stream_table
from report.table import to_csv, to_markdown
from tests.report.records import run_record, write_run


def streamed(seconds: float = 100.0, waited_s: float = 4.0, first_s: float = 9.0) -> dict[str, Any]:
    """An attempt that streamed 2 GB."""
    return {
        "start": 1.0,
        "end": 1.0 + seconds,
        "seconds": seconds,
        "time_to_first_step_s": first_s,
        "phases": {"data_wait": {"mean_s": 6.0, "max_s": 7.0, "network_s": waited_s}},
        "stream": {"bytes_fetched": 2_000_000_000, "network_wait_s": 30.0},
    }


def test_the_streamed_starts_of_a_run_are_added_up() -> None:
    local = {"start": 1.0, "seconds": 50.0, "time_to_first_step_s": 1.0}
    record = run_record("a", attempts=[streamed(), streamed(300.0, 8.0, 11.0), local])
    figures = read_stream(record)
    assert figures is not None
    assert (figures.num_starts, figures.fetched_gb, figures.first_step_s) == (2, 4.0, 10.0)
    assert (figures.reads_waited_s, figures.waited_s, figures.waited_pct) == (60.0, 12.0, 3.0)


@pytest.mark.parametrize("stream", [{}, {"bytes_fetched": "much", "network_wait_s": None}])
def test_a_damaged_block_is_no_error(stream: dict[str, Any]) -> None:
    attempt = {"stream": stream, "phases": {"data_wait": 3}, "time_to_first_step_s": "soon"}
    figures = read_stream({"attempts": [attempt]})
    assert figures is not None
    assert (figures.fetched_gb, figures.first_step_s, figures.waited_pct) == (0.0, None, None)


def test_a_run_that_did_not_stream_has_no_row() -> None:
    assert read_stream(run_record("a")) is None
    assert read_stream({}) is None
    assert stream_table([("a", run_record("a"))]) is None
    table = stream_table([("a", run_record("a")), ("b", run_record("b", attempts=[streamed()]))])
    assert table is not None
    assert [row[0].text for row in table.rows] == ["b"]


def test_the_page_shows_the_transfer_hidden_behind_training(tmp_path: Path) -> None:
    write_run(tmp_path, "plain")
    runs, _ = load_runs([tmp_path])
    assert "Transfer hidden" not in build_page(Contents("title", runs))
    write_run(tmp_path, "streamed", attempts=[streamed()])
    runs, _ = load_runs([tmp_path])
    assert "Transfer hidden behind training" in build_page(Contents("title", runs))


def test_the_grids_table_has_columns_for_it_only_if_a_job_streamed() -> None:
    plain, job = (
        GridJob("1.0", ("A",), SUCCESS, stream=read_stream(record))
        for record in (run_record("a"), run_record("a", attempts=[streamed()]))
    )
    without, with_one = (make_job_table(make_report("title", [one])) for one in (plain, job))
    for text in (to_markdown(without), to_csv([without])):
        assert "stream" not in text and "first step" not in text
    assert "| streamed GB | first step s | network wait s |" in to_markdown(with_one)
    (header, row) = to_csv([with_one]).splitlines()
    assert header.endswith(",stream_fetched_gb,stream_first_step_s,stream_waited_s")
    assert row.endswith(",2.0,9.0,4.0")
