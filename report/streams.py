"""Runs that trained while their tar arrived: what came, and how long the training waited for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from report.record_shape import to_number
from report.table import Cell, Column, Table

GB = 1e9
COLUMNS = (
    Column("run_id", "Run", is_number=False),
    Column("num_starts", "Streamed starts"),
    Column("fetched_gb", "Fetched (GB)"),
    Column("first_step_s", "First step (s)"),
    Column("reads_waited_s", "Reads waited for the network (s)"),
    Column("waited_s", "Training waited for it (s)"),
    Column("waited_pct", "of its time (%)"),
)
NOTE = (
    "the transfer is hidden as far as the training does not wait for it; a read that waits is "
    "ahead of the training. First step: from the start of the process, the mean over the starts"
)


@dataclass(frozen=True)
class StreamFigures:
    """The streamed starts of one run, added up."""

    num_starts: int
    fetched_gb: float
    first_step_s: float | None  # from the start of the process, the mean over the starts
    reads_waited_s: float  # how long at least one read of a rank waited for the network
    waited_s: float  # how long the training did
    seconds: float

    @property
    def waited_pct(self) -> float | None:
        return 100 * self.waited_s / self.seconds if self.seconds > 0 else None


def read_stream(record: Mapping[str, Any]) -> StreamFigures | None:
    """The figures of a run.json; None if no start of the run streamed."""
    starts = [a for a in record.get("attempts") or () if isinstance(a.get("stream"), dict)]
    if not starts:
        return None
    first_steps = [s for a in starts if (s := to_number(a.get("time_to_first_step_s"))) is not None]
    return StreamFigures(
        num_starts=len(starts),
        fetched_gb=sum(_number(a["stream"], "bytes_fetched") for a in starts) / GB,
        first_step_s=sum(first_steps) / len(first_steps) if first_steps else None,
        reads_waited_s=sum(_number(a["stream"], "network_wait_s") for a in starts),
        waited_s=sum(_number(a, "phases", "data_wait", "network_s") for a in starts),
        seconds=sum(_number(a, "seconds") for a in starts),
    )


def _number(record: Any, *names: str) -> float:
    """A number deep in a record, 0 if there is none."""
    for name in names:
        record = record.get(name) if isinstance(record, Mapping) else None
    return max(0.0, to_number(record) or 0.0)


def stream_table(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> Table | None:
    """A row for each run, by its id and record, that streamed."""
    found = [(run_id, figures) for run_id, record in runs if (figures := read_stream(record))]
    if not found:
        return None
    rows = tuple(
        (
            Cell(run_id, run_id),
            Cell(str(figures.num_starts), figures.num_starts),
            Cell(f"{figures.fetched_gb:.3g}", figures.fetched_gb),
            *(
                Cell("" if value is None else f"{value:.1f}", value)
                for value in (
                    figures.first_step_s,
                    figures.reads_waited_s,
                    figures.waited_s,
                    figures.waited_pct,
                )
            ),
        )
        for run_id, figures in found
    )
    return Table("streams", "Transfer hidden behind training", COLUMNS, rows, notes=(NOTE,))
