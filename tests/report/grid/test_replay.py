"""A replay is read from its record, summed up, drawn, and refused where it is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dataset.errors import UserError
from report.grid.plots import draw_replay
from report.grid.replay import (
    NOT_MEASURED,
    is_replay,
    make_replay_tables,
    make_way_table,
    read_replay,
    shape_replay,
)


def make_job(job_id: str, was_s: float, fetch_s: float, succeeded: bool = True) -> dict[str, Any]:
    waits = {"as_it_was": was_s, "fetch": fetch_s}
    return {
        "job_id": job_id,
        "site": "A",
        "outcome": "success",
        "has_arrived": succeeded,
        "succeeded": succeeded,
        "num_stalls": 1,
        "compute_s": 3600,
        "first_step_s": waits,
        "waited_s": waits,
    }


def make_record() -> dict[str, Any]:
    return {
        "kind": "replay",
        "ways": [
            {"key": "as_it_was", "way": "as it was", "stalls": "as recorded"},
            {"key": "fetch", "way": "fetch", "stalls": "slow"},
        ],
        "jobs": [make_job("1", 7200, 60), make_job("2", 3600, 120), make_job("3", 1, 1, False)],
        "checks": [{"label": "wasted", "printed_h": 1.0, "replayed_h": 1.01}],
        "notes": ["assumed: much"],
    }


def test_ways_are_summed_up_over_their_jobs() -> None:
    table = make_way_table(shape_replay(make_record()))
    was, fetch = ([cell.text for cell in row[2:]] for row in table.rows)
    assert was == ["90.0", "0", "90.0", "2.0", "3.0", "2.5"]
    assert fetch == ["1.5", "1", "1.5", "0.0", "0.1", "1.0"]


def test_every_table_of_ways_says_that_it_is_no_measurement() -> None:
    _, ways, jobs = make_replay_tables(shape_replay(make_record()))
    assert ways.notes == (NOT_MEASURED, "assumed: much")
    assert len(jobs.rows) == 3


def test_each_reading_has_its_picture_of_the_jobs_that_got_their_data() -> None:
    (canvas,) = draw_replay(shape_replay(make_record()))
    (axes,) = canvas.axes
    assert "stalls were slow" in axes.get_title()
    assert [len(dots.get_offsets()) for dots in axes.collections] == [2, 2]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ways", []),
        ("ways", [{"key": "as_it_was"}]),
        ("jobs", []),
        ("jobs", [make_job("1", -5, 60)]),
        ("jobs", [make_job("1", float("nan"), 60)]),
        ("jobs", [{"job_id": 3}]),
        ("checks", None),
        ("notes", [7]),
    ],
)
def test_a_damaged_record_is_refused_in_one_line(tmp_path: Path, name: str, value: Any) -> None:
    path = tmp_path / "osg_week.json"
    path.write_text(json.dumps(make_record() | {name: value}))
    with pytest.raises(UserError, match="no replay can be read from it") as refused:
        read_replay(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("text", "is_one"), [('{"kind": "replay"}', True), ("[1]", False)])
def test_a_replay_is_known_by_its_kind(tmp_path: Path, text: str, is_one: bool) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    assert is_replay(path) is is_one
    path.write_text(text[:-1])
    assert not is_replay(path)
