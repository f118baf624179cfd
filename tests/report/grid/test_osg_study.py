"""The OSG study's own tables give the study's figures, and show where its prose differs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from dataset.errors import UserError
from report.grid.osg_study import compare_with_printed, is_study_table, read_study
from report.grid.report import (
    compute_sites,
    compute_slot_time,
    compute_transfer_limits,
    count_causes,
)
from report.grid.rows import GridJob
from report.grid.totals import compute_totals

PUBLISHED = Path(__file__).resolve().parents[3] / "run_results" / "published"
STUDY = PUBLISHED / "osg_100_jobs_5_epochs.csv"
HOUR = 3600


@pytest.fixture(scope="module")
def jobs() -> list[GridJob]:
    return read_study(STUDY)


def total(jobs: list[GridJob], key: str) -> float:
    (value,) = [figure.value for figure in compute_totals(jobs) if figure.key == key]
    assert value is not None
    return value


def test_how_the_jobs_ended(jobs: list[GridJob]) -> None:
    ends = Counter((job.outcome, job.detail if job.outcome == "held" else "") for job in jobs)
    assert ends == {
        ("success", ""): 79,
        ("wrong output", ""): 3,
        ("held", "404 in transfer"): 16,
        ("held", "hold code 47.0 in compute"): 2,
    }
    assert total(jobs, "success_rate") == 0.79


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("compute_successful", 1_196_137),
        ("transfer_successful", 165_029),
        ("retried_successful", 1_088_004),
        ("compute_preempted", 40 * HOUR + 89),
        ("compute_wrong", 33 * 60 + 8),
        ("transfer_wrong", 7_808),
        ("compute_failed", 40 * HOUR + 34 * 60 + 37),
        ("transfer_failed", 10_157),
        ("retried_failed", 134_895),
        ("median_match_to_end", 17_845),
    ],
)
def test_the_totals_of_the_table(jobs: list[GridJob], key: str, value: float) -> None:
    assert total(jobs, key) == value


def test_the_figures_that_the_study_rounds(jobs: list[GridJob]) -> None:
    assert total(jobs, "mean_match_to_end") == pytest.approx(31_006.7, abs=0.05)
    assert total(jobs, "compute_successful") / HOUR == pytest.approx(332.3, abs=0.05)
    assert total(jobs, "transfer_overhead") == pytest.approx(0.14, abs=0.005)


@pytest.mark.parametrize(
    ("site", "num_jobs", "mean_s", "median_s"),
    [
        ("CHTC-Spark-CE1", 24, 11_222.3, 11_237),
        ("GP-ARGO-ksu-backfill", 13, 23_399.9, 17_608),
        ("PDX-Coeus-CE1", 42, 14_823.9, 14_846),
    ],
)
def test_compute_by_site(
    jobs: list[GridJob], site: str, num_jobs: int, mean_s: float, median_s: float
) -> None:
    (figures,) = [figures for figures in compute_sites(jobs) if figures.site == site]
    assert figures.num_jobs == num_jobs
    assert figures.compute_mean_s == pytest.approx(mean_s, abs=0.05)
    assert figures.compute_median_s == median_s


def test_the_causes_of_failure_are_the_shares_of_the_studys_pie(jobs: list[GridJob]) -> None:
    causes = count_causes(jobs)
    shares = {cause: round(100 * count / 21, 1) for cause, count in causes.items()}
    assert shares == {"held in transfer": 76.2, "wrong output": 14.3, "held in compute": 9.5}


def test_prose_and_table_are_compared(jobs: list[GridJob]) -> None:
    comparisons = compare_with_printed(STUDY, compute_totals(jobs))
    printed = {c.printed: c for c in comparisons}
    assert len(printed) == len(comparisons) == 21
    compute = printed["318.6 hours"]
    assert not compute.agrees
    assert compute.recomputed / HOUR == pytest.approx(332.3, abs=0.05)
    assert "794570.010" in printed["13 days 6 hours 33 min 53 sec"].note
    preempted = printed["16 hours 1 min 29 sec"]
    assert not preempted.agrees
    assert preempted.recomputed - preempted.printed_value == 24 * HOUR
    agreeing = {printed for printed, c in printed.items() if c.agrees}
    assert agreeing == {
        "18", "3", "79%", "33 min 8 sec", "8 hours 36 min 46 sec", "4 hours 57 min 25 sec", "14%",
    }  # fmt: skip


def test_no_transfer_over_3441_s_succeeded_and_no_stall_cost_less_than_62_minutes(
    jobs: list[GridJob],
) -> None:
    figures = {figure.key: figure.value for figure in compute_transfer_limits(jobs)}
    assert figures["longest_transfer"] == 3441
    assert 62 < (figures["least_stall"] or 0) / 60 < 63


def test_the_shares_of_slot_time_add_up(jobs: list[GridJob]) -> None:
    rows = compute_slot_time(jobs)
    assert sum(row.share for row in rows) == pytest.approx(1)
    retried = next(row for row in rows if row.cause == "retried input transfers")
    assert retried.seconds == 1_088_004


def test_the_two_smaller_runs_are_read() -> None:
    pilot = read_study(PUBLISHED / "osg_5_epochs_pilot.csv")
    assert (len(pilot), total(pilot, "num_successful")) == (5, 5)
    assert total(pilot, "retried_successful") == (4121 - 492) + (10359 - 773)
    long = read_study(PUBLISHED / "osg_20_epochs.csv")
    assert (total(long, "success_rate"), long[1].outcome) == (0.8, "removed")
    assert total(long, "compute_successful") == 56290 + 43339 + 64328 + 56057
    assert compare_with_printed(PUBLISHED / "osg_20_epochs.csv", compute_totals(long)) == []


def test_only_the_studys_tables_are_taken_for_them() -> None:
    assert is_study_table(STUDY)
    assert not is_study_table(PUBLISHED / "kempner_a100.csv")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("success", "fine", "outcome 'fine' of 1.0; known: success"),
        ("11182", "soon", "time_execute_s of 1.0 is 'soon'; seconds are expected"),
        ("stalls", "stops", "lacks the column stalls"),
    ],
)
def test_a_damaged_table_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (
        "job_id,site,time_execute_s,time_slot_busy_s,transfer_total_s,stalls,outcome\n"
        "1.0,A,11182,13283,2100,0,success\n"
    )
    path = tmp_path / "table.csv"
    path.write_text(text.replace(old, new))
    with pytest.raises(UserError, match=message):
        read_study(path)
