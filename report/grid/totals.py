"""The totals of a set of grid jobs: the rows of the OSG study's tables and its headline shares."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from report.grid.jobs import (
    HELD,
    NOT_OVER,
    PREEMPTED_COMPUTE,
    PREEMPTED_TRANSFER,
    WRONG_OUTPUT,
)
from report.grid.rows import GridJob


@dataclass(frozen=True)
class Figure:
    """One number with the sentence that defines it."""

    key: str
    label: str
    value: float | None
    unit: str  # count, s or share
    definition: str = ""


Jobs = Sequence[GridJob]
_LAST = "the last transfer, if there were retries"
_END = "successful jobs: start of the first input transfer to termination"


def get_useful_s(job: GridJob) -> float:
    """What a job computed and kept."""
    return job.compute_s - job.lost_compute_s


def split_jobs(jobs: Jobs) -> dict[str, list[GridJob]]:
    """The groups of the study's tables; 'failed' is every job that is over without success."""
    preempted = (HELD, PREEMPTED_COMPUTE, PREEMPTED_TRANSFER)
    return {
        "successful": [job for job in jobs if job.succeeded],
        "preempted": [job for job in jobs if job.outcome in preempted],
        "wrong": [job for job in jobs if job.outcome == WRONG_OUTPUT],
        "failed": [job for job in jobs if not job.succeeded and job.outcome not in NOT_OVER],
    }


def compute_totals(jobs: Jobs) -> list[Figure]:
    """All totals, in the order of the study's tables."""
    groups = split_jobs(jobs)
    ends = [job.match_to_end_s for job in groups["successful"] if job.match_to_end_s is not None]
    return [
        *_count(jobs, groups),
        *(_sum_up(row, groups) for row in _SUMS),
        Figure("mean_match_to_end", "Mean time from first match to the end", mean(ends), "s", _END),
        Figure(
            "median_match_to_end",
            "Median time from first match to the end",
            median(ends),
            "s",
            _END,
        ),
        *_share(groups),
    ]


@dataclass(frozen=True)
class _Sum:
    """A row of the study: one part of the time of one group of jobs."""

    part: str
    group: str
    label: str
    definition: str = ""


_PARTS: dict[str, Callable[[GridJob], float]] = {
    "compute": lambda job: job.compute_s,
    "useful": get_useful_s,
    "transfer": lambda job: job.transfer_last_s,
    "retried": lambda job: job.transfer_retried_s,
}
_SUMS = (
    _Sum(
        "useful",
        "successful",
        "Computing for successful jobs",
        "executing, without output transfers, in-job fetch and compute lost to evictions",
    ),
    _Sum("transfer", "successful", "Transferring files for successful jobs", _LAST),
    _Sum(
        "retried",
        "successful",
        "Wasted by transfers that were retried (successful jobs)",
        "all input transfers before the last one",
    ),
    _Sum(
        "compute",
        "preempted",
        "Wasted in compute due to preemption",
        "jobs that ended held or preempted",
    ),
    _Sum("transfer", "preempted", "Wasted in file transfers for preempted jobs", _LAST),
    _Sum("compute", "wrong", "Wasted in compute due to wrong outputs"),
    _Sum("transfer", "wrong", "Wasted in file transfer for wrong outputs", _LAST),
    _Sum("compute", "failed", "Wasted in compute due to ALL failed jobs"),
    _Sum("transfer", "failed", "Wasted in file transfer for ALL failed jobs", _LAST),
    _Sum(
        "retried",
        "failed",
        "Wasted by transfers that were retried (failed jobs)",
        "the study has no such row",
    ),
)


def _sum_up(row: _Sum, groups: dict[str, list[GridJob]]) -> Figure:
    part = "compute" if row.part == "useful" else row.part
    total_s = float(sum(_PARTS[row.part](job) for job in groups[row.group]))
    return Figure(f"{part}_{row.group}", row.label, total_s, "s", row.definition)


def _count(jobs: Jobs, groups: dict[str, list[GridJob]]) -> list[Figure]:
    good, failed = len(groups["successful"]), len(groups["failed"])
    checked = "exit 0 and a run.json that says done; without a run.json the output is unchecked"
    held = "Number of jobs that ended held or preempted"
    wrong = "Number of jobs that failed due to wrong output"
    return [
        Figure("num_jobs", "Number of jobs", len(jobs), "count"),
        Figure("num_successful", "Number of successful jobs", good, "count", checked),
        Figure(
            "success_rate", "Success rate", ratio(good, good + failed), "share", "of jobs now over"
        ),
        Figure("num_preempted", held, len(groups["preempted"]), "count", "no automated recovery"),
        Figure(
            "num_wrong", wrong, len(groups["wrong"]), "count", "terminated, but no verified result"
        ),
    ]


def _share(groups: dict[str, list[GridJob]]) -> list[Figure]:
    """The study's headline shares, on the sum of its rows."""
    sums = {(row.part, row.group): _sum_up(row, groups).value or 0.0 for row in _SUMS}
    compute_s = sums["useful", "successful"]
    last_s, retried_s = sums["transfer", "successful"], sums["retried", "successful"]
    total_s = (
        compute_s + last_s + retried_s + sums["compute", "failed"] + sums["transfer", "failed"]
    )
    rows = "compute and transfers of successful and failed jobs, as the study adds them up"
    overhead = "successful transfers against successful computing"
    of = "of that slot time"
    return [
        Figure("accounted", "Slot time in these rows", total_s, "s", rows),
        Figure("share_compute", "Successful computing", ratio(compute_s, total_s), "share", of),
        Figure("share_transfer", "Successful file transfers", ratio(last_s, total_s), "share", of),
        Figure("share_retried", "Retried file transfers", ratio(retried_s, total_s), "share", of),
        Figure(
            "transfer_overhead",
            "File transfer overhead",
            ratio(last_s, compute_s),
            "share",
            overhead,
        ),
    ]


def mean(values: Sequence[float]) -> float | None:
    """The mean, or None of nothing."""
    return statistics.fmean(values) if values else None


def median(values: Sequence[float]) -> float | None:
    """The median, or None of nothing."""
    return float(statistics.median(values)) if values else None


def ratio(part: float, whole: float) -> float | None:
    """part / whole, or None where there is no whole."""
    return part / whole if whole else None
