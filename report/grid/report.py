"""The grid report, from event logs or study tables to figures: totals, sites, waste by cause."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dataset.errors import UserError
from report.grid.eventlog import read_event_logs
from report.grid.history import read_histories
from report.grid.jobs import HELD, NOT_OVER, UNCHECKED
from report.grid.osg_study import Comparison, compare_with_printed, read_study
from report.grid.rows import GridJob, make_row, read_records
from report.grid.totals import Figure, compute_totals, get_useful_s, mean, median
from report.words import count


@dataclass(frozen=True)
class SiteFigures:
    """One site's successful jobs, and the input transfers that succeeded there."""

    site: str
    num_jobs: int
    compute_mean_s: float | None
    compute_median_s: float | None
    num_transfers: int
    transfer_mean_s: float | None
    transfer_median_s: float | None
    first_transfer_s: float | None
    later_mean_s: float | None
    later_median_s: float | None


@dataclass(frozen=True)
class SlotTime:
    """Time in slots by what became of it."""

    cause: str
    is_waste: bool
    seconds: float
    share: float


@dataclass(frozen=True)
class GridReport:
    """Everything about one set of jobs."""

    title: str
    jobs: tuple[GridJob, ...]
    totals: tuple[Figure, ...]
    sites: tuple[SiteFigures, ...]
    limits: tuple[Figure, ...]
    slot_time: tuple[SlotTime, ...]
    comparisons: tuple[Comparison, ...] = ()
    remarks: tuple[str, ...] = ()


def report_logs(logs: Sequence[Path], runs: Sequence[Path], tells_runs: bool = True) -> GridReport:
    """The report of event logs, checked by the records that came back.

    `tells_runs`: whether records that cannot be used are among its remarks.
    """
    events = read_event_logs(list(logs))
    records, notes = read_records(list(runs))
    histories = read_histories(events.events)
    jobs = [make_row(history, records.get(history.job)) for history in histories]
    if not jobs:
        raise UserError(f"no job in {', '.join(map(str, logs))}; did it start yet?")
    remarks = [*events.describe_losses(), *(notes if tells_runs else ())]
    return make_report("Grid report", jobs, remarks=remarks)


def report_tables(paths: Sequence[Path]) -> GridReport:
    """The report of a study's own tables, against its printed totals where they are known."""
    jobs = [job for path in paths for job in read_study(path)]
    comparisons = compare_with_printed(paths[0], compute_totals(jobs)) if len(paths) == 1 else []
    names = ", ".join(path.name for path in paths)
    return make_report(f"Grid report of {names}", jobs, comparisons=comparisons)


def make_report(
    title: str,
    jobs: Sequence[GridJob],
    *,
    comparisons: Sequence[Comparison] = (),
    remarks: Sequence[str] = (),
) -> GridReport:
    """The report of the jobs."""
    unchecked = sum(job.outcome == UNCHECKED for job in jobs)
    if unchecked:
        remarks = [
            *remarks,
            f"{count(unchecked, 'job')} ended with exit 0 without a run.json to check: counted as "
            "successful, but the output is unchecked.",
        ]
    remarks = [*remarks, *dict.fromkeys(job.citation for job in jobs if job.citation)]
    return GridReport(
        title,
        tuple(jobs),
        tuple(compute_totals(jobs)),
        tuple(compute_sites(jobs)),
        tuple(compute_transfer_limits(jobs)),
        tuple(compute_slot_time(jobs)),
        tuple(comparisons),
        tuple(remarks),
    )


def name_cause(job: GridJob) -> str:
    """Why a job failed: its outcome, and of a held one where it was."""
    return f"held in {job.phase}" if job.outcome == HELD else job.outcome


def count_causes(jobs: Iterable[GridJob]) -> Counter[str]:
    """The failed jobs by cause."""
    failed = (job for job in jobs if not job.succeeded and job.outcome not in NOT_OVER)
    return Counter(name_cause(job) for job in failed)


def compute_sites(jobs: Sequence[GridJob]) -> list[SiteFigures]:
    """Each site's figures; a job counts where it ended, a transfer where it arrived."""
    arrived = [t for job in jobs for t in job.transfers if t.succeeded]
    arrived.sort(key=lambda transfer: transfer.start_s)
    compute: defaultdict[str, list[float]] = defaultdict(list)
    times: defaultdict[str, list[float]] = defaultdict(list)
    for job in jobs:
        if job.succeeded and job.site:
            compute[job.site].append(get_useful_s(job))
    for transfer in arrived:
        times[transfer.site].append(transfer.seconds)
    return [
        SiteFigures(
            site,
            len(compute[site]),
            mean(compute[site]),
            median(compute[site]),
            len(times[site]),
            mean(times[site]),
            median(times[site]),
            times[site][0] if times[site] else None,
            mean(times[site][1:]),
            median(times[site][1:]),
        )
        for site in sorted({*compute, *times})
    ]


def compute_transfer_limits(jobs: Sequence[GridJob]) -> list[Figure]:
    """What tells a time limit from a bad network: the longest success and the cheapest stall."""
    done = [t.seconds for job in jobs for t in job.transfers if t.succeeded]
    per_stall = [job.transfer_retried_s / job.num_stalls for job in jobs if job.num_stalls]
    num_stalls = sum(job.num_stalls for job in jobs)
    cost = "a job's retried transfer time / its number of stalls"
    return [
        Figure("num_stalls", "Stalled input transfers", num_stalls, "count"),
        Figure("longest_transfer", "Longest transfer that succeeded", max(done, default=None), "s"),
        Figure("least_stall", "Least time lost per stall", min(per_stall, default=None), "s", cost),
        Figure("median_stall", "Median time lost per stall", median(per_stall), "s", cost),
    ]


def compute_slot_time(jobs: Sequence[GridJob]) -> list[SlotTime]:
    """All slot time by what became of it: the useful first, then the largest waste first."""
    sums: defaultdict[tuple[bool, str], float] = defaultdict(float)
    for job in jobs:
        for cause, is_waste, seconds in _split_time(job):
            sums[is_waste, cause] += seconds
    total_s = sum(sums.values())
    rows = [
        SlotTime(cause, is_waste, seconds, seconds / total_s)
        for (is_waste, cause), seconds in sums.items()
        if seconds > 0
    ]
    return sorted(rows, key=lambda row: (row.is_waste, -row.seconds))


def _split_time(job: GridJob) -> list[tuple[str, bool, float]]:
    """(cause, whether it is waste, seconds) of all the slot time of a job."""
    if job.outcome in NOT_OVER:
        return [("jobs that are not over yet", False, job.slot_busy_s or 0.0)]
    rows = [
        ("output and checkpoint transfers", False, job.output_s),
        ("start-up and other", False, job.other_s),
    ]
    if not job.succeeded:
        input_s = job.transfer_last_s + job.transfer_retried_s + job.fetch_s
        return [
            *rows,
            (f"jobs that ended '{name_cause(job)}': compute", True, job.compute_s),
            (f"jobs that ended '{name_cause(job)}': input", True, input_s),
        ]
    failed_s = job.transfer_retried_s - job.stalled_s - job.repeated_s
    return [
        *rows,
        ("computing for successful jobs", False, get_useful_s(job)),
        ("input transfers of successful jobs, the last of each", False, job.transfer_last_s),
        ("in-job fetch of successful jobs", False, job.fetch_s - job.refetch_s),
        ("stalled input transfers", True, job.stalled_s),
        ("retried input transfers", True, failed_s),
        ("evictions: computing since the last checkpoint", True, job.lost_compute_s),
        ("evictions: input brought again", True, job.repeated_s + job.refetch_s),
    ]
