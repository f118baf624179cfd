"""Where the numbers of a page come from: runs, code, versions, hosts, and settings that differ."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from report.record_shape import is_number
from report.runs import ReportedRun
from report.table import Cell, Column, Table
from report.words import count, name_sizes

MAX_VALUES = 6
_PER_RUN = ("output", "deadline")  # different in every run, and of no interest


def run_table(runs: Sequence[ReportedRun]) -> Table | None:
    """One row for each run, published rows excepted."""
    recorded = [run for run in runs if run.record]
    if not recorded:
        return None
    columns = (
        Column("run_id", "Run", is_number=False),
        Column("status", "Status", is_number=False),
        Column("gpu", "GPU", is_number=False),
        Column("num_gpus", name_sizes(run.gpu for run in recorded)),
        Column("num_nodes", "#N"),
        Column("batch_size", "Batch Size"),
        Column("wall_clock_s", "WCT (s)"),
        Column("images_per_s", "Images/s"),
        Column("val_acc1", "Val Acc@1"),
        Column("attempts", "Attempts"),
        Column("launcher", "Launcher", is_number=False),
        Column("host", "Host", is_number=False),
        Column("commit", "Commit", is_number=False),
        Column("started", "Started (UTC)", is_number=False),
    )
    return Table("runs", "Runs", columns, tuple(_run_row(run) for run in recorded))


def _run_row(run: ReportedRun) -> tuple[Cell, ...]:
    record = run.record
    attempts = record.get("attempts") or []
    first = attempts[0] if attempts else {}
    speed = run.images / run.wall_clock_s if run.images and run.wall_clock_s else None
    code = record.get("exit_code")
    status = run.status if code in (None, 0) else f"{run.status} (exit {code})"
    return (
        _word(run.run_id),
        _word(status),
        _word(run.gpu),
        Cell(str(run.num_gpus), run.num_gpus),
        Cell(str(run.num_nodes), run.num_nodes),
        Cell(str(run.batch_size), run.batch_size),
        _number(run.wall_clock_s, 1),
        _number(speed, 1),
        _number(run.acc1, 2),
        Cell(str(len(attempts)), len(attempts)),
        _word(first.get("launcher")),
        _word(record.get("host")),
        _word(record.get("commit")),
        _word(_utc(first.get("start"))),
    )


def settings_tables(runs: Sequence[ReportedRun]) -> list[Table]:
    """Settings, versions and data: what all runs share, and what differs with how many runs."""
    recorded = [run for run in runs if run.record]
    if not recorded:
        return []
    facts = [_facts(run) for run in recorded]
    names = list(dict.fromkeys(name for fact in facts for name in fact))
    shared, differing = [], []
    for name in names:
        counts = Counter(_show(fact.get(name)) for fact in facts)
        if len(counts) == 1:
            shared.append((_word(name), _word(next(iter(counts)))))
            continue
        common = counts.most_common(MAX_VALUES)
        shown = [f"{value} ({count(number, 'run')})" for value, number in common]
        if len(counts) > MAX_VALUES:
            shown.append(f"and {len(counts) - MAX_VALUES} more values")
        differing.append((_word(name), _word("; ".join(shown))))
    columns = (
        Column("name", "Setting", is_number=False),
        Column("value", "Value", is_number=False),
    )
    tables = [Table("settings_differing", "Settings that differ", columns, tuple(differing))]
    tables.append(Table("settings_shared", "Settings that all runs share", columns, tuple(shared)))
    return [table for table in tables if table.rows]


def _facts(run: ReportedRun) -> dict[str, Any]:
    """Every setting, version and fact about data and code, by a name with its room."""
    facts = {name: value for name, value in run.config.items() if name not in _PER_RUN}
    facts |= {f"version of {k}": v for k, v in (run.record.get("versions") or {}).items()}
    facts |= {f"data {k}": v for k, v in (run.record.get("dataset") or {}).items()}
    facts |= {name: run.record.get(name) for name in ("commit", "host", "device")}
    return facts


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _word(value: Any) -> Cell:
    text = "" if value is None else str(value)
    return Cell(text, text)


def _number(value: float | None, decimals: int) -> Cell:
    return Cell("" if value is None else f"{value:.{decimals}f}", value)


def _utc(seconds: Any) -> str | None:
    if not is_number(seconds) or not 0 <= seconds < 2**40:
        return None
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
