"""The grid report as tables: how jobs ended, totals, slot time, sites, transfers and the jobs."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from report.grid.jobs import HELD, OUTCOMES
from report.grid.report import GridReport
from report.grid.rows import GridJob
from report.grid.totals import Figure
from report.table import Cell, Column, Table, Value
from report.words import choose_unit

SITE_NOTE = (
    "compute: successful jobs that ended at the site; transfers: every input transfer that "
    "succeeded there, the first one against the later ones"
)
_NO_COLUMN = ("transfers", "citation", "stream")
STREAM_COLUMNS = {
    "fetched_gb": "streamed GB",
    "first_step_s": "first step s",
    "waited_s": "network wait s",
}
STALL_NOTE = (
    "stalled: ended by HTCondor's transfer watchdog; an attempt succeeds only if 001 follows"
)


def make_tables(report: GridReport) -> list[Table]:
    """All tables of the report, in reading order."""
    tables = [
        make_outcome_table(report),
        make_figure_table("totals", "Totals", report.totals),
        make_comparison_table(report),
        make_slot_time_table(report),
        make_site_table(report),
        make_figure_table("transfers", "Transfers and their limit", report.limits, (STALL_NOTE,)),
        make_job_table(report),
    ]
    return [table for table in tables if table.rows]


def make_outcome_table(report: GridReport) -> Table:
    """How many jobs came to each end; what could not be read stands below."""
    counts = Counter((job.outcome, _hold_cause(job)) for job in report.jobs)
    rows = tuple(
        (_word(outcome), _word(cause), _number(count))
        for (outcome, cause), count in sorted(
            counts.items(), key=lambda item: (OUTCOMES.index(item[0][0]), -item[1])
        )
    )
    columns = (
        Column("outcome", "outcome", is_number=False),
        Column("cause", "cause", is_number=False),
        Column("jobs", "jobs"),
    )
    table = Table("outcomes", "How the jobs ended", columns, rows, notes=report.remarks)
    return table.without_empty_columns()


def _hold_cause(job: GridJob) -> str:
    return job.detail if job.outcome == HELD else ""


def make_figure_table(
    name: str, caption: str, figures: Sequence[Figure], notes: tuple[str, ...] = ()
) -> Table:
    """Figures with their definitions; times in seconds and as days and clock."""
    columns = (
        Column("label", "", is_number=False),
        Column("value", "value"),
        Column("clock", "d hh:mm:ss"),
        Column("definition", "definition", is_number=False),
    )
    rows = tuple((_word(f.label), _value(f), Cell(_clock(f)), _word(f.definition)) for f in figures)
    data = tuple(dataclasses.asdict(figure) for figure in figures)
    return Table(name, caption, columns, rows, data, notes).without_empty_columns()


def make_comparison_table(report: GridReport) -> Table:
    """The study's printed totals beside what its own job table gives."""
    columns = (
        Column("label", "", is_number=False),
        Column("printed", "printed"),
        Column("recomputed", "recomputed"),
        Column("clock", "d hh:mm:ss"),
        Column("agrees", "agrees", is_number=False),
        Column("note", "remark", is_number=False),
    )
    rows = []
    for c in report.comparisons:
        figure = Figure("", c.label, c.recomputed, c.unit)
        agrees = _word("yes" if c.agrees else "NO")
        rows.append(
            (_word(c.label), Cell(c.printed, c.printed_value), _value(figure), Cell(_clock(figure)),
             agrees, _word(c.note))
        )  # fmt: skip
    data = tuple(dataclasses.asdict(c) | {"agrees": c.agrees} for c in report.comparisons)
    note = "a printed figure agrees if the recomputed one rounds to it"
    return Table("published", "Published against recomputed", columns, tuple(rows), data, (note,))


def make_slot_time_table(report: GridReport) -> Table:
    """Where the time in slots went, as hours (or minutes) and share."""
    unit = choose_unit(max((row.seconds for row in report.slot_time), default=0.0))
    columns = (
        Column("cause", "slot time", is_number=False),
        Column(unit.name, unit.name),
        Column("share", "share"),
    )
    rows = tuple(
        (
            _word(f"wasted: {row.cause}" if row.is_waste else row.cause),
            Cell(f"{row.seconds / unit.seconds:,.1f}", row.seconds / unit.seconds),
            Cell(f"{100 * row.share:.1f} %", row.share),
        )
        for row in report.slot_time
    )
    data = tuple(dataclasses.asdict(row) for row in report.slot_time)
    wasted = [row for row in report.slot_time if row.is_waste]
    time, share = (
        sum(row.seconds for row in wasted) / unit.seconds,
        sum(row.share for row in wasted),
    )
    notes = (
        f"wasted in all: {time:,.1f} {unit.name}, {100 * share:.1f} %",
        "retried input transfers: all before a job's last one that no watchdog ended",
    )
    return Table("slot_time", "Where the slot time went", columns, rows, data, notes)


def make_site_table(report: GridReport) -> Table:
    """Mean and median compute and transfer of each site, first against later transfers."""
    headings = {
        "num_jobs": "jobs",
        "compute_mean_s": "compute mean s",
        "compute_median_s": "compute median s",
        "num_transfers": "transfers",
        "transfer_mean_s": "transfer mean s",
        "transfer_median_s": "transfer median s",
        "first_transfer_s": "first s",
        "later_mean_s": "later mean s",
        "later_median_s": "later median s",
    }
    columns = (
        Column("site", "site", is_number=False),
        *(Column(key, heading) for key, heading in headings.items()),
    )
    rows = tuple(
        (_word(site.site), *(_number(getattr(site, key)) for key in headings))
        for site in report.sites
    )
    data = tuple(dataclasses.asdict(site) for site in report.sites)
    return Table("sites", "Sites", columns, rows, data, (SITE_NOTE,))


def make_job_table(report: GridReport) -> Table:
    """The study's table of jobs, with what it had no column for."""
    words = {"job_id": "job", "sites": "sites", "outcome": "outcome", "detail": "detail"}
    numbers = {
        "compute_s": "compute s",
        "slot_busy_s": "slot busy s",
        "transfer_last_s": "last transfer s",
        "transfer_retried_s": "retried s",
        "num_stalls": "stalls",
        "fetch_s": "in-job fetch s",
        "lost_compute_s": "lost compute s",
        "match_to_end_s": "match to end s",
        "num_evictions": "evictions",
        "num_disconnects": "disconnects",
    }
    columns = (
        *(Column(key, words[key], is_number=False) for key in ("job_id", "sites", "outcome")),
        *(Column(key, heading) for key, heading in (numbers | STREAM_COLUMNS).items()),
        Column("holds", "holds", is_number=False),
        Column("detail", "detail", is_number=False),
    )
    rows = tuple(
        (
            *(_word(_join(getattr(job, key))) for key in ("job_id", "sites", "outcome")),
            *(_number(getattr(job, key), blank_zero=True) for key in numbers),
            *(_number(getattr(job.stream, key, None)) for key in STREAM_COLUMNS),
            _word(_join(job.holds)),
            _word(_shorten(job.detail)),
        )
        for job in report.jobs
    )
    has_streams = any(job.stream for job in report.jobs)
    data = tuple(_job_record(job, has_streams) for job in report.jobs)
    table = Table("jobs", "Jobs", columns, rows, data)
    return table.without_empty_columns(keep=("job_id", "sites", "outcome"))


def _job_record(job: GridJob, has_streams: bool) -> dict[str, Value]:
    names = [field.name for field in dataclasses.fields(job) if field.name not in _NO_COLUMN]
    record = {name: _join(getattr(job, name)) for name in names}
    if has_streams:
        record |= {f"stream_{key}": getattr(job.stream, key, None) for key in STREAM_COLUMNS}
    return record


def _join(value: object) -> Value:
    if isinstance(value, tuple):
        return ";".join(str(part) for part in value)
    assert value is None or isinstance(value, str | int | float)
    return value


def _word(text: Value) -> Cell:
    return Cell(str(text), text)


def _number(value: float | None, *, blank_zero: bool = False) -> Cell:
    if value is None or (blank_zero and not value):
        return Cell("", value)
    return Cell(f"{value:,.1f}".removesuffix(".0"), value)


def _value(figure: Figure) -> Cell:
    if figure.value is None:
        return Cell("-", None)
    if figure.unit == "share":
        return Cell(f"{100 * figure.value:.1f} %", figure.value)
    unit = " s" if figure.unit == "s" else ""
    return Cell((_number(figure.value).text or "0") + unit, figure.value)


def _clock(figure: Figure) -> str:
    if figure.unit != "s" or figure.value is None:
        return ""
    days, rest = divmod(round(figure.value), 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days} d {clock}" if days else clock


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 120 else line[:117] + "..."
