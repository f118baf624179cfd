"""From files to the grid report: event logs with the records that came back, or study tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dataset.errors import UserError
from report.grid.eventlog import read_event_logs
from report.grid.history import read_histories
from report.grid.osg_study import compare_with_printed, read_study
from report.grid.report import GridReport, make_report
from report.grid.rows import make_row, read_records
from report.grid.tables import describe_log
from report.grid.totals import compute_totals


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
    remarks = [*describe_log(events), *(notes if tells_runs else ())]
    return make_report("Grid report", jobs, remarks=remarks)


def report_tables(paths: Sequence[Path]) -> GridReport:
    """The report of a study's own tables, against its printed totals where they are known."""
    jobs = [job for path in paths for job in read_study(path)]
    comparisons = compare_with_printed(paths[0], compute_totals(jobs)) if len(paths) == 1 else []
    names = ", ".join(path.name for path in paths)
    return make_report(f"Grid report of {names}", jobs, comparisons=comparisons)
