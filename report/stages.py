"""What each stage used of the machine, as the WORKS'21 study tabulates it, beside its figures."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataset.errors import DataError
from report.published_table import cite
from report.record_shape import MAX_CHARS, is_number, to_number
from report.search.trials import TRIAL_FILE
from report.table import Cell, Column, Table, Value
from report.words import count
from train.records.record import STAGES_FILE, iter_lines

PUBLISHED = Path(__file__).resolve().parents[1] / "run_results" / "published" / "works21_stages.csv"
# Our stages in the study's terms; the stages of a search's trials are its hpo.
STUDY_STAGE = {
    "fetch": "preprocess",
    "index": "preprocess",
    "extract": "preprocess",
    "train": "train",
    "evaluate": "evaluate",
}
_ORDER = ("preprocess", "hpo", "train", "evaluate")
MB, GB = 1e6, 1e9
COLUMNS = (
    Column("stage", "Stage", is_number=False),
    Column("workflow", "Workflow", is_number=False),
    Column("step", "Step", is_number=False),
    Column("io_read_mb", "I/O Read (MB)"),
    Column("io_write_mb", "I/O Write (MB)"),
    Column("avg_cpu_pct", "Avg. CPU (%)"),
    Column("peak_memory_gb", "Peak Memory (GB)"),
    Column("avg_gpu_pct", "Avg. GPU (%)"),
    Column("peak_gpu_memory_gb", "Peak GPU Memory (GB)"),
    Column("avg_exec_s", "Avg. Exec. Time (s)"),
    Column("num_measured", "Measured"),
)


@dataclass(frozen=True)
class StageFigures:
    """The mean of all measurements of one stage; memory is the highest peak."""

    stage: str
    workflow: str
    step: str
    io_read_mb: float | None = None
    io_write_mb: float | None = None
    avg_cpu_pct: float | None = None
    peak_memory_gb: float | None = None
    avg_gpu_pct: float | None = None
    peak_gpu_memory_gb: float | None = None
    avg_exec_s: float | None = None
    num_measured: int | None = None


def load_stages(paths: Sequence[Path]) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The stage records at or below the paths, and a note for each file with torn lines.

    Those of a trial name it, and the folder of its search.
    """
    records: list[Mapping[str, Any]] = []
    notes = []
    for path in paths:
        files = sorted(path.rglob(STAGES_FILE)) if path.is_dir() else []
        for file in [path] if path.name == STAGES_FILE else files:
            is_trial = (file.parent / TRIAL_FILE).exists()
            folder = file.parent
            search = {"search": str(folder.parent), "trial": folder.name} if is_trial else {}
            num_torn = 0
            for record in iter_lines(file):
                if record is not None and is_number(record.get("seconds")):
                    records.append(record | search)
                else:
                    num_torn += 1
            if num_torn:
                notes.append(f"{file}: {count(num_torn, 'torn line')} left out")
    return records, notes


def summarise_stages(records: Sequence[Mapping[str, Any]]) -> list[StageFigures]:
    """Our stages, each over all its measurements that ended well; a search is one stage."""
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    searches: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        if record.get("status", "done") != "done":
            continue
        if "search" in record:
            searches[str(record["search"])].append(record)
        else:
            groups[str(record.get("stage"))[:MAX_CHARS]].append(record)
    return [*_summarise_groups(groups), *(_sum_up(*item) for item in searches.items())]


def _sum_up(folder: str, group: Sequence[Mapping[str, Any]]) -> StageFigures:
    """A search as the study counts it: one job, with all that its trials read, wrote and used."""
    seconds = sum(float(record["seconds"]) for record in group)
    return StageFigures(
        stage="hpo",
        workflow="this one",
        step=f"search {Path(folder).name}"[:MAX_CHARS],
        io_read_mb=_total(group, "bytes_read", MB),
        io_write_mb=_total(group, "bytes_written", MB),
        avg_cpu_pct=_mean_over_time(group, "cpu_pct"),
        peak_memory_gb=_peak(group, "peak_rss_bytes"),
        avg_gpu_pct=_mean_over_time(group, "gpu_pct"),
        peak_gpu_memory_gb=_peak(group, "peak_gpu_memory_bytes"),
        avg_exec_s=seconds,
        num_measured=1,
    )


def _summarise_groups(groups: Mapping[str, list[Mapping[str, Any]]]) -> list[StageFigures]:
    return [
        StageFigures(
            stage=STUDY_STAGE.get(stage, stage),
            workflow="this one",
            step=stage,
            io_read_mb=_mean(group, "bytes_read", MB),
            io_write_mb=_mean(group, "bytes_written", MB),
            avg_cpu_pct=_mean(group, "cpu_pct", 1.0),
            peak_memory_gb=_peak(group, "peak_rss_bytes"),
            avg_gpu_pct=_mean(group, "gpu_pct", 1.0),
            peak_gpu_memory_gb=_peak(group, "peak_gpu_memory_bytes"),
            avg_exec_s=_mean(group, "seconds", 1.0),
            num_measured=len(group),
        )
        for stage, group in groups.items()
    ]


def read_published_stages(path: Path = PUBLISHED) -> list[StageFigures]:
    """The figures of the WORKS'21 study."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    try:
        return [_published(row) for row in rows]
    except (KeyError, ValueError) as error:
        raise DataError(f"{path} is not the published stage table ({error!r})") from None


def _published(row: Mapping[str, str]) -> StageFigures:
    def number(name: str) -> float | None:
        return float(row[name]) if row[name] else None

    return StageFigures(
        stage=row["stage"],
        workflow=f"{row['workflow']} (published)",
        step=" ".join(word for word in (row["step"], row["data_type"]) if word),
        io_read_mb=number("io_read_mb"),
        io_write_mb=number("io_write_mb"),
        avg_cpu_pct=number("avg_cpu_pct"),
        peak_memory_gb=number("peak_memory_gb"),
        avg_gpu_pct=number("avg_gpu_pct"),
        peak_gpu_memory_gb=number("peak_gpu_memory_gb"),
        avg_exec_s=number("avg_exec_s"),
    )


def stage_table(
    ours: Sequence[StageFigures], published: Sequence[StageFigures] = ()
) -> Table | None:
    """Our stages above the published ones of the same kind."""
    figures = [*ours, *published]
    if not figures:
        return None
    order = {stage: index for index, stage in enumerate(_ORDER)}
    figures.sort(key=lambda f: order.get(f.stage, len(order)))  # stable: ours stay first
    rows = tuple(_cells(figure) for figure in figures)
    notes = [
        "I/O is what the processes asked to read and write, page cache included; the published "
        "study saw it through Darshan. A search is counted as one job: its trials added up, one "
        "after another.",
    ]
    if published:
        notes.append(cite(PUBLISHED))
    table = Table("stages", "Resources by stage", COLUMNS, rows, (), tuple(filter(None, notes)))
    return table.without_empty_columns()


def _cells(figures: StageFigures) -> tuple[Cell, ...]:
    values: list[Value] = [getattr(figures, column.key) for column in COLUMNS]
    return tuple(Cell(_text(value), value) for value in values)


def _text(value: Value) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _mean(group: Sequence[Mapping[str, Any]], key: str, unit: float) -> float | None:
    values = [value for record in group if (value := to_number(record.get(key))) is not None]
    return sum(values) / len(values) / unit if values else None


def _total(group: Sequence[Mapping[str, Any]], key: str, unit: float) -> float | None:
    mean = _mean(group, key, unit)
    return None if mean is None else mean * len(group)


def _mean_over_time(group: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """The mean of a share, in which a long stage counts for more than a short one."""
    pairs = [(to_number(record.get(key)), float(record["seconds"])) for record in group]
    known = [(value, seconds) for value, seconds in pairs if value is not None and seconds > 0]
    total_s = sum(seconds for _, seconds in known)
    return sum(value * seconds for value, seconds in known) / total_s if known else None


def _peak(group: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [value for record in group if (value := to_number(record.get(key))) is not None]
    return max(values) / GB if values else None
