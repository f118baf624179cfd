"""Whole workflows and where their data lay, as the WORKS'21 study tabulates them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from dataset.errors import CommandError
from report.published_table import cite, read_csv
from report.record_shape import shape_record, to_number, to_whole
from report.search.trials import Search
from report.table import Cell, Column, Table, Value
from train.records.record import Record, read_run

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
        "A search of this project: the jobs, epochs, input and output of all its trials. Its input "
        "files are the images of a folder of class folders; its GPU hours are the time that its "
        "trainings and evaluations had a GPU. A cell is empty if the records do not tell."
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
    runs = {trial.name: _read_trial_run(search.folder / trial.name) for trial in search.trials}
    epochs = sum(max(trial.reports, default=0) for trial in search.trials)
    read, written = (_values(own, key) for key in ("bytes_read", "bytes_written"))
    busy_s = [_get(r, "cpu_pct") / 100 * _get(r, "seconds") for r in own if "cpu_pct" in r]
    peaks = {
        name: max(_values(own, key), default=0.0) / GB or None
        for name, key in (
            ("peak_memory_gb", "peak_rss_bytes"),
            ("peak_gpu_memory_gb", "peak_gpu_memory_bytes"),
        )
    }
    return {
        "workflow": f"this one, search {search.name}",
        "jobs": sum(max(1, len(trial.jobs)) for trial in search.trials),
        "input_files": max(filter(None, map(_count_files, runs.values())), default=None),
        "trials": len(search.trials),
        "epochs": epochs,
        "batch_size": _name_batch_sizes(runs.values()),
        "io_read_gb": sum(read) / GB if read else None,
        "io_write_gb": sum(written) / GB if written else None,
        "cpu_hours": sum(busy_s) / 3600 if busy_s else None,
        "gpu_hours": _add_gpu_hours(own, runs),
        **peaks,
    }


def _read_trial_run(folder: Path) -> Record:
    """The run.json of a trial; nothing if it has none, or one that cannot be read."""
    try:
        return shape_record(read_run(folder))[0]
    except (CommandError, OSError):
        return {}


def _count_files(run: Record) -> int | None:
    """The images of a folder of class folders, each a file; a tar is not one file an image."""
    dataset = run.get("dataset") or {}
    if dataset.get("source") != "folder":
        return None
    num_train = to_whole(dataset.get("num_train"))
    return num_train + (to_whole(dataset.get("num_val")) or 0) if num_train else None


def _name_batch_sizes(runs: Collection[Record]) -> Value:
    """The batch size of all trials; a text if they differ."""
    found = {to_whole((run.get("config") or {}).get("batch_size")) for run in runs} - {None}
    sizes = sorted(size for size in found if size is not None)
    return sizes[0] if len(sizes) == 1 else ", ".join(map(str, sizes)) or None


def _add_gpu_hours(
    records: Sequence[Mapping[str, Any]], runs: Mapping[str, Record]
) -> float | None:
    """The seconds of the stages on GPUs, by the ranks of their trial: a rank has a GPU.

    A run names its GPU; of a stage with gpu_pct and no run the number of ranks is not known, and
    so the hours of the search are not. On a machine with GPUs a run on CPUs has gpu_pct, too.
    """
    seconds: list[float] = []
    for record in records:
        run = runs.get(str(record.get("trial")), {})
        device = run.get("device") or ("unknown" if "gpu_pct" in record else "cpu")
        if device == "cpu":
            continue
        num_ranks = to_whole(run.get("world_size"))
        if num_ranks is None:
            return None
        seconds.append(num_ranks * _get(record, "seconds"))
    return sum(seconds) / 3600 if seconds else None


def _values(records: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """The numbers of those records that have one."""
    return [value for record in records if (value := to_number(record.get(key))) is not None]


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
