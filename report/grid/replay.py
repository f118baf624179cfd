"""A study's jobs replayed with other ways to bring the data: a record, read and as tables.

benchmarks/osg_week.py computes it. What is shown here is read from its record and summed up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataset.errors import UserError
from report.grid.totals import mean, median
from report.record_shape import is_number
from report.table import Cell, Column, Table
from report.words import HOURS, MINUTES, TimeUnit

KIND = "replay"
AS_IT_WAS = "as_it_was"
SOON_S = 60.0
NOT_MEASURED = (
    "this is a replay of recorded rows and not a measurement: neither our fetch nor streaming ran "
    "in these jobs, and streaming is a model of its design"
)
Seconds = Mapping[str, float]  # by the key of a way


@dataclass(frozen=True)
class Way:
    """A way to bring the data, with one reading of the stalls."""

    key: str
    way: str
    stalls: str


@dataclass(frozen=True)
class Check:
    """A figure that the study prints, and what the replay makes of its rows."""

    label: str
    printed_h: float
    replayed_h: float


@dataclass(frozen=True)
class ReplayedJob:
    """What one job waited, in every way."""

    job_id: str
    site: str
    outcome: str
    has_arrived: bool  # its data, ever
    succeeded: bool
    num_stalls: int
    compute_s: float
    first_step_s: Seconds  # from the first match
    waited_s: Seconds  # the same, and every later wait for data


@dataclass(frozen=True)
class Replay:
    """A whole study, replayed."""

    ways: tuple[Way, ...]
    jobs: tuple[ReplayedJob, ...]
    checks: tuple[Check, ...]
    notes: tuple[str, ...]

    @property
    def arrived(self) -> list[ReplayedJob]:
        return [job for job in self.jobs if job.has_arrived]


def is_replay(path: Path) -> bool:
    """Whether a file is the record of a replay."""
    try:
        record = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and record.get("kind") == KIND


def read_replay(path: Path) -> Replay:
    """The replay of a record."""
    try:
        return shape_replay(json.loads(path.read_bytes()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{path}: no replay can be read from it ({type(error).__name__}: {error}); write it "
            "again: python benchmarks/osg_week.py"
        ) from None


def shape_replay(record: Mapping[str, Any]) -> Replay:
    """The replay that a record describes; TypeError, KeyError or ValueError where it is damaged."""
    ways = tuple(
        Way(*(_text(way[name]) for name in ("key", "way", "stalls"))) for way in record["ways"]
    )
    keys = [way.key for way in ways]
    if AS_IT_WAS not in keys:
        raise KeyError(AS_IT_WAS)
    jobs = tuple(_shape_job(job, keys) for job in record["jobs"])
    if not any(job.has_arrived for job in jobs) or not any(job.succeeded for job in jobs):
        raise ValueError("no job that got its data and succeeded")
    checks = tuple(
        Check(_text(row["label"]), _number(row["printed_h"]), _number(row["replayed_h"]))
        for row in record["checks"]
    )
    return Replay(ways, jobs, checks, tuple(map(_text, record["notes"])))


def _shape_job(job: Mapping[str, Any], keys: list[str]) -> ReplayedJob:
    first_step_s, waited_s = (
        {key: _number(job[name][key]) for key in keys} for name in ("first_step_s", "waited_s")
    )
    return ReplayedJob(
        _text(job["job_id"]),
        _text(job["site"]),
        _text(job["outcome"]),
        job["has_arrived"] is True,
        job["succeeded"] is True,
        int(_number(job["num_stalls"])),
        _number(job["compute_s"]),
        first_step_s,
        waited_s,
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    return value


def _number(value: Any) -> float:
    if not is_number(value) or value < 0:
        raise TypeError(f"{value!r:.40} is no number of 0 or more")
    return float(value)


def make_replay_tables(replay: Replay) -> list[Table]:
    """All tables of a replay, in reading order."""
    return [make_check_table(replay), make_way_table(replay), make_wait_table(replay)]


def make_check_table(replay: Replay) -> Table:
    """What had to come out before anything else was replayed."""
    columns = (
        Column("label", "hours", is_number=False),
        Column("printed_h", "the study prints"),
        Column("replayed_h", "replayed from its rows"),
    )
    rows = tuple(
        (
            Cell(check.label, check.label),
            _cell(check.printed_h, "{:,.2f}"),
            _cell(check.replayed_h, "{:,.2f}"),
        )
        for check in replay.checks
    )
    return Table("replay_checks", "The study's own waste, reproduced first", columns, rows)


def make_way_table(replay: Replay) -> Table:
    """Each way with each reading of the stalls: first steps, waits, and when the jobs ended."""
    num = len(replay.arrived)
    columns = (
        Column("way", "way", is_number=False),
        Column("stalls", "what the stalls were", is_number=False),
        Column("first_step_median_min", "first step, median (min)"),
        Column("first_step_soon", f"within {SOON_S:.0f} s (of {num})"),
        Column("waited_median_min", "waited, median (min)"),
        Column("waited_most_h", "waited, most (h)"),
        Column("waited_all_h", "waited, all jobs (h)"),
        Column("mean_end_h", "successful: first match to end, mean (h)"),
    )
    rows = tuple(_way_row(replay, way) for way in replay.ways)
    caption = f"What the {len(replay.jobs)} jobs would have waited for their data"
    notes = (NOT_MEASURED, *replay.notes)
    return Table("replay", caption, columns, rows, notes=notes)


def _way_row(replay: Replay, way: Way) -> tuple[Cell, ...]:
    first_s = [job.first_step_s[way.key] for job in replay.arrived]
    waited_s = [job.waited_s[way.key] for job in replay.arrived]
    ends_s = [job.waited_s[way.key] + job.compute_s for job in replay.jobs if job.succeeded]
    soon = sum(seconds <= SOON_S for seconds in first_s)
    return (
        Cell(way.way, way.way),
        Cell(way.stalls, way.stalls),
        _time(median(first_s), MINUTES),
        Cell(str(soon), soon),
        _time(median(waited_s), MINUTES),
        _time(max(waited_s), HOURS),
        _time(sum(job.waited_s[way.key] for job in replay.jobs), HOURS),
        _time(mean(ends_s), HOURS),
    )


def make_wait_table(replay: Replay) -> Table:
    """What each job waited, in minutes."""
    names = {"job_id": "job", "site": "site", "outcome": "outcome"}
    columns = (
        *(Column(key, heading, is_number=False) for key, heading in names.items()),
        Column("num_stalls", "stalls"),
        *(Column(way.key, f"{way.way} (min); stalls {way.stalls}") for way in replay.ways),
    )
    rows = tuple(
        (
            *(Cell(word, word) for word in (job.job_id, job.site, job.outcome)),
            Cell(str(job.num_stalls or ""), job.num_stalls),
            *(_time(job.waited_s[way.key], MINUTES) for way in replay.ways),
        )
        for job in replay.jobs
    )
    return Table("replay_jobs", "What each job would have waited for its data", columns, rows)


def _time(seconds: float | None, unit: TimeUnit) -> Cell:
    assert seconds is not None, "a replay has jobs that arrived and jobs that succeeded"
    return _cell(seconds / unit.seconds, "{:,.1f}")


def _cell(value: float, style: str) -> Cell:
    return Cell(style.format(value), round(value, 4))
