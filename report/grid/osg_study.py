"""The OSG study's own tables: its jobs as rows of the grid report, and its printed totals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dataset.errors import UserError
from report.grid.jobs import (
    HELD,
    IN_COMPUTE,
    IN_TRANSFER,
    REMOVED,
    SUCCESS,
    UNKNOWN_SITE,
    WRONG_OUTPUT,
    Transfer,
)
from report.grid.rows import GridJob
from report.grid.totals import Figure
from report.published_table import cite, read_csv
from report.record_shape import shorten, to_number

# The study's words for an end: our outcome, where the job was, and why.
_OUTCOMES = {
    "success": (SUCCESS, IN_COMPUTE, ""),
    "wrong_output": (WRONG_OUTPUT, IN_COMPUTE, ""),
    "held_404": (HELD, IN_TRANSFER, "404 in transfer"),
    "held_47_execute_duration": (HELD, IN_COMPUTE, "hold code 47.0 in compute"),
    "removed_stuck_stalling": (REMOVED, IN_TRANSFER, "kept stalling"),
}
_COLUMNS = ("job_id", "time_execute_s", "time_slot_busy_s", "transfer_total_s", "stalls", "outcome")
PRINTED_SUFFIX = "_printed.csv"


@dataclass(frozen=True)
class Comparison:
    """One total of the study as printed against the same total computed from its job table."""

    label: str
    printed: str
    printed_value: float
    precision: float  # half of the last printed digit
    recomputed: float
    unit: str
    note: str

    @property
    def agrees(self) -> bool:
        """Whether the recomputed value rounds to the printed one."""
        return abs(self.recomputed - self.printed_value) <= self.precision


def is_study_table(path: Path) -> bool:
    """Whether a file is one of the study's job tables, by its header line."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.readline().startswith("job_id,site")


def read_study(path: Path) -> list[GridJob]:
    """The jobs of one of the study's tables, in its order."""
    rows = read_csv(path, _COLUMNS)
    citation = cite(path)
    return [
        replace(_read_row(path, order, row), citation=citation)
        for order, (_, row) in enumerate(rows)
    ]


def _read_row(path: Path, order: int, row: Mapping[str, str]) -> GridJob:
    if row["outcome"] not in _OUTCOMES:
        known = ", ".join(_OUTCOMES)
        raise UserError(f"{path}: outcome {row['outcome']!r} of {row['job_id']}; known: {known}")
    outcome, phase, why = _OUTCOMES[row["outcome"]]
    sites = tuple(site for site in (row.get("sites") or row.get("site") or "").split(";") if site)
    total_s = _seconds(path, row, "transfer_total_s")
    num_stalls = int(_seconds(path, row, "stalls"))
    busy_s = _seconds(path, row, "time_slot_busy_s") if row["time_slot_busy_s"] else None
    compute_s = _seconds(path, row, "time_execute_s")
    if row.get("transfer_last_s"):
        last_s = _seconds(path, row, "transfer_last_s")
    elif num_stalls and busy_s:  # the table of 20 epochs has no such column
        last_s = busy_s - compute_s
    else:
        last_s = total_s
    # The table has no times: its order stands for the order of the transfers.
    arrived = phase != IN_TRANSFER
    last = Transfer(order, order + last_s, arrived, site=sites[-1] if sites else UNKNOWN_SITE)
    return GridJob(
        job_id=row["job_id"],
        sites=sites,
        outcome=outcome,
        phase=phase,
        detail=why or (row.get("note") or ""),
        compute_s=compute_s,
        transfer_last_s=last_s,
        transfer_retried_s=total_s - last_s,
        transfer_span_s=total_s,
        num_stalls=num_stalls,
        other_s=max(0.0, busy_s - compute_s - last_s) if busy_s else 0.0,
        slot_busy_s=busy_s,
        match_to_end_s=busy_s + total_s - last_s if busy_s else None,
        transfers=(last,),
    )


def _seconds(path: Path, row: Mapping[str, str], name: str) -> float:
    text = row.get(name) or "0"
    try:
        value = to_number(float(text))
    except ValueError:
        value = None
    if value is None or value < 0:
        raise UserError(
            f"{path}: {name} of {row['job_id'][:40]} is {shorten(text)}; seconds are expected"
        )
    return value


def compare_with_printed(path: Path, totals: Sequence[Figure]) -> list[Comparison]:
    """The study's printed totals (TABLE_printed.csv beside TABLE.csv) against the computed ones."""
    printed = path.with_name(path.stem + PRINTED_SUFFIX)
    if not printed.exists():
        return []
    by_key = {figure.key: figure for figure in totals}
    comparisons = []
    for line, row in read_csv(printed, ("key", "printed", "value", "precision", "note")):
        figure = by_key.get(row["key"])
        if figure is None or figure.value is None:
            raise UserError(f"{printed}: no total is called {row['key']!r}")
        try:
            value, precision = float(row["value"]), float(row["precision"])
        except ValueError:
            raise UserError(f"{printed}:{line}: value and precision must be numbers") from None
        comparisons.append(
            Comparison(
                figure.label,
                row["printed"],
                value,
                precision,
                figure.value,
                figure.unit,
                row["note"],
            )
        )
    return comparisons
