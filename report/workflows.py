"""Whole workflows and where their data lay, as the WORKS'21 study tabulates them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from report.published_table import cite, read_csv
from report.record_shape import to_number
from report.search.trials import Search
from report.table import Cell, Column, Table, Value

PUBLISHED = Path(__file__).resolve().parents[1] / "run_results" / "published"
WORKFLOWS, PLACEMENTS = PUBLISHED / "works21_workflows.csv", PUBLISHED / "works21_placement.csv"
GB = 1e9
WORKFLOW_COLUMNS = (
    Column("workflow", "Workflow", is_number=False),
    Column("jobs", "#Jobs"),
    Column("aux_jobs", "#Aux. Jobs"),
    Column("input_files", "#Input Files"),
    Column("input_gb", "Input Size (GB)"),
    Column("container_gb", "Container Size (GB)"),
    Column("trials", "#Trials"),
    Column("epochs", "#Epochs"),
    Column("batch_size", "Batch Size"),
    Column("io_read_gb", "I/O Read (GB)"),
    Column("io_write_gb", "I/O Write (GB)"),
    Column("peak_memory_gb", "Peak Memory (GB)"),
    Column("peak_gpu_memory_gb", "Peak GPU Memory (GB)"),
    Column("cpu_hours", "CPU Hours"),
    Column("gpu_hours", "GPU Hours"),
)
PLACEMENT_COLUMNS = (
    Column("workflow", "Workflow", is_number=False),
    Column("scenario", "Scenario", is_number=False),
    Column("jobs", "Jobs"),
    Column("aux_jobs", "Aux. Jobs"),
    Column("transfer_threads", "Transfer Threads"),
    Column("files_staged_in", "Files Staged In"),
)


def workflow_table(searches: Sequence[Search], records: Sequence[Mapping[str, Any]]) -> Table:
    """Our searches, as far as their records tell, above the published workflows."""
    ours = [_describe(search, records) for search in searches]
    published = [_published(row) for _, row in read_csv(WORKFLOWS, _keys(WORKFLOW_COLUMNS))]
    of_ours = (
        "A search of this project: the jobs, epochs, input and output of all its trials; what the "
        "records do not tell is empty."
    )
    notes = (*([of_ours] if ours else []), cite(WORKFLOWS))
    return _make_table("workflows", "Whole workflows", WORKFLOW_COLUMNS, [*ours, *published], notes)


def placement_table() -> Table:
    """The published placements of the data."""
    rows = [_published(row) for _, row in read_csv(PLACEMENTS, _keys(PLACEMENT_COLUMNS))]
    title = "Placements of the data (published; benchmarks/placement.py measures ours)"
    return _make_table("placements", title, PLACEMENT_COLUMNS, rows, (cite(PLACEMENTS),))


def _describe(search: Search, records: Sequence[Mapping[str, Any]]) -> dict[str, Value]:
    own = [record for record in records if record.get("search") == str(search.folder)]
    epochs = sum(max(trial.reports, default=0) for trial in search.trials)
    busy_s = [_get(r, "cpu_pct") / 100 * _get(r, "seconds") for r in own]
    peaks = {
        name: max((_get(r, key) for r in own), default=0.0) / GB or None
        for name, key in (
            ("peak_memory_gb", "peak_rss_bytes"),
            ("peak_gpu_memory_gb", "peak_gpu_memory_bytes"),
        )
    }
    return {
        "workflow": f"this one, search {search.name}",
        "jobs": sum(max(1, len(trial.jobs)) for trial in search.trials),
        "trials": len(search.trials),
        "epochs": epochs,
        "io_read_gb": sum(_get(r, "bytes_read") for r in own) / GB,
        "io_write_gb": sum(_get(r, "bytes_written") for r in own) / GB,
        "cpu_hours": sum(busy_s) / 3600,
        **peaks,
    }


def _get(record: Mapping[str, Any], key: str) -> float:
    return to_number(record.get(key)) or 0.0


def _published(row: Mapping[str, str]) -> dict[str, Value]:
    """The row with its numbers as numbers."""
    values: dict[str, Value] = dict(row)
    for key, text in row.items():
        try:
            values[key] = int(text) if text.isdigit() else float(text)
        except ValueError:
            continue
    return values | {"workflow": f"{row['workflow']} (published)"}


def _keys(columns: Sequence[Column]) -> list[str]:
    return [column.key for column in columns]


def _make_table(
    name: str,
    title: str,
    columns: tuple[Column, ...],
    rows: Sequence[Mapping[str, Value]],
    notes: Sequence[str],
) -> Table:
    cells = tuple(
        tuple(Cell(_text(row.get(c.key)), row.get(c.key)) for c in columns) for row in rows
    )
    return Table(name, title, columns, cells, (), tuple(filter(None, notes)))


def _text(value: Value) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("_", " ")
