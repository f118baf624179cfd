"""The OSG study's week replayed: its own waste comes out first, and no way waits longer than it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.bench import RESULTS
from benchmarks.osg_week import STUDY, replay
from benchmarks.osg_week_model import (
    INDEX_BYTES,
    LIMIT_S,
    OBJECT_BYTES,
    READINGS,
    Link,
    share_needed,
    split_wait,
    wait_of_fetch,
    waits_of_stream,
)
from dataset.errors import DataError, UserError
from report.grid.osg_study import read_study
from report.grid.replay import make_way_table, read_replay
from report.html import table_html

RECORD = RESULTS / "osg_week.json"
PRINTED = STUDY.with_name("osg_100_jobs_5_epochs_printed.csv")
NEEDED = np.linspace(0.003, 1, 100)


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return replay(STUDY, NEEDED)


def copy_study(folder: Path, job: str = "", **cells: str) -> Path:
    """The study's table with some cells of a job changed, and its printed totals beside it."""
    with open(STUDY, newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if row["job_id"] == job:
            row |= cells
    path = folder / STUDY.name
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    (folder / PRINTED.name).write_text(PRINTED.read_text())
    return path


def test_the_studys_waste_comes_out_of_its_rows(result: dict[str, Any]) -> None:
    replayed_h = {check["label"]: check["replayed_h"] for check in result["checks"]}
    assert replayed_h["wasted by transfers that were retried (successful jobs)"] == pytest.approx(
        302.2, abs=0.05
    )
    for check in result["checks"]:
        assert check["replayed_h"] == pytest.approx(check["printed_h"], abs=0.05)


def test_another_waste_than_the_studys_ends_the_replay(tmp_path: Path) -> None:
    path = copy_study(tmp_path, "794570.003.000", transfer_total_s="141650")
    with pytest.raises(DataError, match=r"replay gives 305\.00 hours, the study prints 302\.21"):
        replay(path, NEEDED)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"stalls": "2"}, r"2 stalls of 3,600 s do not fit into the 3,752 s before its last"),
        ({"transfer_total_s": "7505", "transfer_last_s": "3753"}, "a last transfer of 3,753 s"),
        ({"transfer_last_s": "0", "stalls": "0"}, "a last transfer of 0 s"),
    ],
)
def test_a_row_that_contradicts_the_limit_is_refused(
    tmp_path: Path, cells: dict[str, str], message: str
) -> None:
    path = copy_study(tmp_path, "794569.031.000", **cells)
    with pytest.raises(DataError, match=message):
        replay(path, NEEDED)


@pytest.mark.parametrize(
    ("text", "message"),
    [("key,value\nx,soon\n", "column value has numbers"), ("key,value\n", "lack retried_succ")],
)
def test_printed_totals_that_say_nothing_are_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    path = copy_study(tmp_path)
    (tmp_path / PRINTED.name).write_text(text)
    with pytest.raises(UserError, match=message):
        replay(path, NEEDED)


def test_streaming_never_waits_longer_than_the_fetch_nor_the_fetch_than_the_study(
    result: dict[str, Any],
) -> None:
    assert len(result["jobs"]) == 100
    for job in result["jobs"]:
        first, waited = job["first_step_s"], job["waited_s"]
        with_index = 1 + INDEX_BYTES / OBJECT_BYTES  # the study's jobs had none to fetch
        for reading in READINGS:
            fetch, stream = f"fetch_{reading.key}", f"stream_{reading.key}"
            assert first[stream] <= waited[stream] <= waited[fetch]
            assert waited[fetch] <= waited["as_it_was"] * with_index + 0.1


def test_without_a_stall_every_reading_is_the_same(result: dict[str, Any]) -> None:
    job = next(job for job in result["jobs"] if job["job_id"] == "794569.000.000")
    for kind in ("fetch", "stream"):
        assert len({job["waited_s"][f"{kind}_{reading.key}"] for reading in READINGS}) == 1
    assert job["waited_s"]["fetch_silent"] == pytest.approx(2100, rel=1e-3)


def test_a_job_without_its_data_waits_as_recorded(result: dict[str, Any]) -> None:
    missing = [job for job in result["jobs"] if not job["has_arrived"]]
    assert len(missing) == 16
    assert {seconds for job in missing for seconds in job["waited_s"].values()} == {1.0}


def test_what_an_eviction_cost_is_kept_and_what_a_cut_cost_is_not() -> None:
    jobs = {job.job_id: split_wait(job) for job in read_study(STUDY)[:60]}
    stalled, evicted = jobs["794570.003.000"], jobs["794570.006.000"]
    assert (stalled.cut_s, stalled.between_s, stalled.kept_s) == (28 * LIMIT_S, 28215, 0)
    assert (evicted.cut_s, evicted.between_s, evicted.kept_s) == (LIMIT_S, 0, 18301)


def test_bytes_of_a_slow_spell_are_kept() -> None:
    link = Link(spell_s=10.0, spell_rate=1.0, rate=5.0)
    assert link.arrival_s(np.array([5.0, 10.0, 20.0])).tolist() == [5.0, 10.0, 12.0]
    silent = Link(spell_s=10.0, spell_rate=0.0, rate=5.0)
    assert silent.arrival_s(np.array([5.0, 20.0])).tolist() == [11.0, 14.0]


@pytest.mark.parametrize(("epoch_s", "waited_s"), [(1e6, 10.0), (1000.0, 500.0)])
def test_streaming_costs_the_larger_of_link_and_compute(epoch_s: float, waited_s: float) -> None:
    """A link of 1,500 s, 10 s of it before step 1: the rest hides behind as long a compute."""
    link = Link(0.0, 0.0, rate=(OBJECT_BYTES + INDEX_BYTES) / 1500)
    needed = (np.linspace(10, 1500, 1491) / 1500) * (1 + INDEX_BYTES / OBJECT_BYTES)
    needed -= INDEX_BYTES / OBJECT_BYTES
    first_s, all_s = waits_of_stream(link, needed, epoch_s)
    assert first_s == pytest.approx(10)
    assert all_s == pytest.approx(waited_s, rel=0.01)
    assert wait_of_fetch(link) == pytest.approx(1500)


def test_a_step_needs_the_units_of_its_images_and_of_all_steps_before() -> None:
    needed = share_needed()
    assert len(needed) == 1_281_000 // 256
    assert (np.diff(needed) >= 0).all() and needed[-1] == pytest.approx(1, abs=1e-3)
    assert 200 < needed[0] * 70_000 <= 256  # a batch lies in about as many of the 70,000 units


def test_the_committed_record_is_what_the_rows_give_today() -> None:
    record, today = json.loads(RECORD.read_text()), replay(STUDY, share_needed())
    assert [job["job_id"] for job in record["jobs"]] == [job["job_id"] for job in today["jobs"]]
    for was, now in zip(record["jobs"], today["jobs"], strict=True):
        for name in ("first_step_s", "waited_s"):
            assert was[name] == pytest.approx(now[name], abs=0.11)
    assert record["notes"] == today["notes"]


def test_the_published_page_has_the_table_and_its_pictures() -> None:
    page = STUDY.with_name("report.html").read_text()
    assert table_html(make_way_table(read_replay(RECORD))) in page
    assert page.count('<figure data-name="replay-0-') == len(READINGS)
