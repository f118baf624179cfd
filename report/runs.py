"""The runs that a report is about, read from run folders and from published CSV tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dataset.errors import CommandError, DataError, UserError
from report.example_logs import (
    LOG_COLUMNS,
    WALL_CLOCK,
    ExampleLog,
    describe_gaps,
    read_log,
    refuse_bare_log,
    to_record,
)
from report.published_table import read_csv, read_header
from report.record_shape import shape_record, shorten, to_number, to_positive, to_whole
from report.search.trials import TRIAL_FILE
from train.records.record import RUN_FILE, find_runs, read_run

CSV_COLUMNS = ("gpu", "batch_size", "num_nodes", "num_gpus", "lr", "wall_clock_s")


@dataclass(frozen=True)
class ReportedRun:
    """One run as the tables need it; what its record lacks is None."""

    source: str
    run_id: str
    status: str
    gpu: str
    batch_size: int
    num_nodes: int
    num_gpus: int
    lr: float | None = None
    wall_clock_s: float | None = None
    images: float | None = None
    steady_images_per_s: float | None = None
    acc1: float | None = None
    acc5: float | None = None
    epochs: float | None = None
    record: Mapping[str, Any] = field(default_factory=dict)
    epoch_lines: Sequence[Mapping[str, Any]] | None = None  # of a log; else they are in a file

    @property
    def is_done(self) -> bool:
        return self.status == "done" and self.wall_clock_s is not None

    @property
    def config(self) -> Mapping[str, Any]:
        config = self.record.get("config")
        return config if isinstance(config, dict) else {}

    @property
    def arch(self) -> str:
        return str(self.config.get("arch", ""))

    @property
    def gpu_hours(self) -> float | None:
        return None if self.wall_clock_s is None else self.wall_clock_s * self.num_gpus / 3600


def load_runs(
    paths: Sequence[Path], epochs: int | None = None
) -> tuple[list[ReportedRun], list[str]]:
    """The runs at or below the paths, and notes on those that had to be left out."""
    folders = [path for path in paths if path.suffix != ".csv"]
    runs: list[ReportedRun] = []
    notes: list[str] = []
    for path in paths:
        if path.suffix == ".csv" and "log" in read_header(path):
            logged, more = read_log_runs(path)
            runs, notes = runs + logged, notes + more
        elif path.suffix == ".csv":
            runs += read_csv_runs(path, epochs)
        elif path.is_file() and path.name != RUN_FILE:
            refuse_bare_log(path)
            raise UserError(
                f"{path} is neither a run folder nor a published CSV; "
                "give folders that hold run.json files"
            )
    for folder in find_runs(folders):
        if (folder / TRIAL_FILE).exists():  # of a search, which is shown as a whole
            continue
        try:
            record, odd = shape_record(read_run(folder))
            if odd:
                notes.append(f"{folder / RUN_FILE}: passed over: {'; '.join(odd)}")
            runs.append(run_from_record(record, str(folder)))
        except (CommandError, OSError) as error:
            notes.append(f"left out: {error}")
    runs = _drop_doubles(runs, notes)
    if not runs:
        looked = ", ".join(str(path) for path in paths) or "nothing"
        reason = f" ({notes[0]})" if notes else ""
        raise UserError(f"no runs found in {looked}{reason}; give folders that hold run.json files")
    return runs, notes


def run_from_record(record: Mapping[str, Any], source: str) -> ReportedRun:
    """The run of a run.json; a record without its sizes is refused by name."""
    config = record.get("config") or {}
    result = record.get("result") or {}
    num_gpus = _whole(record.get("world_size"), f"{source}: world_size")
    for name in ("wall_clock_s", "images_trained"):
        value = record.get(name)
        if record.get("status") == "done" and to_positive(value) is None:
            raise DataError(f"{source}: {name} is {shorten(value)} in a run that is done")
    return ReportedRun(
        source=source,
        run_id=str(record.get("run_id") or Path(source).name),
        status=str(record.get("status")),
        gpu=short_device(str(record.get("device") or "unknown")),
        batch_size=_whole(config.get("batch_size"), f"{source}: batch_size"),
        num_nodes=_whole(record.get("num_nodes"), f"{source}: num_nodes"),
        num_gpus=num_gpus,
        lr=to_number(config.get("lr")),
        wall_clock_s=to_positive(record.get("wall_clock_s")),
        images=to_positive(record.get("images_trained")),
        steady_images_per_s=to_positive(record.get("steady_images_per_s")),
        acc1=to_number(result.get("final_acc1")),
        acc5=to_number(result.get("final_acc5")),
        epochs=_epochs(record),
        record=record,
    )


def read_csv_runs(path: Path, epochs: int | None = None) -> list[ReportedRun]:
    """The rows of a published table; a row without a wall clock is a point still missing."""
    rows = read_csv(path, CSV_COLUMNS)
    return [_run_from_row(row, f"{path}:{line}", epochs) for line, row in rows]


def read_log_runs(path: Path) -> tuple[list[ReportedRun], list[str]]:
    """The runs whose logs a CSV names, with the sizes that it gives them, and notes on the logs."""
    runs: list[ReportedRun] = []
    notes = [WALL_CLOCK]
    for line, row in read_csv(path, LOG_COLUMNS):
        file = path.parent / row["log"].strip()
        if not row["log"].strip() or not file.is_file():
            raise UserError(f"{path}:{line}: no log {file}; name it as seen from the CSV's folder")
        log = read_log(file)
        runs.append(_run_from_log(row, log, file, f"{path}:{line}"))
        notes += describe_gaps(log, file)
    return runs, notes


def _run_from_log(row: Mapping[str, str], log: ExampleLog, file: Path, source: str) -> ReportedRun:
    """What a log measured, with the sizes of its row: a log says neither batch nor GPUs."""
    sizes = {
        name: _whole(_cell(row, name, source), f"{source}: {name}")
        for name in ("batch_size", "num_nodes", "num_gpus")
    }
    measured, lines = to_record(log, sizes["batch_size"])
    config = {"arch": log.arch, "batch_size": sizes["batch_size"], "lr": _cell(row, "lr", source)}
    record = measured | {
        "run_id": str(file),
        "config": config,
        "world_size": sizes["num_gpus"],
        "num_nodes": sizes["num_nodes"],
        "device": row["gpu"],
    }
    run = run_from_record(record, str(file))
    epoch_images = log.num_batches * sizes["batch_size"]
    return replace(run, epochs=(run.images or 0.0) / epoch_images, epoch_lines=lines)


def short_device(device: str) -> str:
    """The model of a device as a table shows it: NVIDIA A100-SXM4-80GB is A100."""
    name = re.sub(r"\b(NVIDIA|AMD|Intel|Tesla|Quadro|GeForce|Instinct)\b", "", device).strip()
    match = re.match(r"([A-Z]{1,3}\d{1,4}[A-Za-z]?)(?=-|\s|$)", name)
    return match.group(1) if match else name or device


def _run_from_row(row: Mapping[str, str], source: str, epochs: int | None) -> ReportedRun:
    wall_clock_s = _cell(row, "wall_clock_s", source)
    return ReportedRun(
        source=source,
        run_id=source,
        status="missing" if wall_clock_s is None else "done",
        gpu=row["gpu"],
        batch_size=_whole(_cell(row, "batch_size", source), f"{source}: batch_size"),
        num_nodes=_whole(_cell(row, "num_nodes", source), f"{source}: num_nodes"),
        num_gpus=_whole(_cell(row, "num_gpus", source), f"{source}: num_gpus"),
        lr=_cell(row, "lr", source),
        wall_clock_s=wall_clock_s,
        acc1=_cell(row, "val_acc1", source),
        acc5=_cell(row, "val_acc5", source),
        epochs=epochs,
    )


def _cell(row: Mapping[str, str], name: str, source: str) -> float | None:
    text = row.get(name, "").strip()
    if not text or text.upper() == "TBD":
        return None
    try:
        value = to_number(float(text))
    except ValueError:
        raise UserError(f"{source}: {name} is {shorten(text)}, not a number") from None
    if value is None or (name == "wall_clock_s" and to_positive(value) is None):
        raise UserError(f"{source}: {name} is {shorten(text)}; it must be a number above 0")
    return value


def _whole(value: Any, where: str) -> int:
    number = to_whole(value)
    if number is None:
        raise UserError(f"{where} is {shorten(value)}; it must be a whole number above 0")
    return number


def _epochs(record: Mapping[str, Any]) -> float | None:
    """Passes over the training set that were really made: --max-steps cuts them short."""
    images = to_positive(record.get("images_trained"))
    num_train = to_positive((record.get("dataset") or {}).get("num_train"))
    return images / num_train if images and num_train else None


def _drop_doubles(runs: list[ReportedRun], notes: list[str]) -> list[ReportedRun]:
    """One run for each id: a copied folder must not count as a repeat."""
    by_id: dict[str, ReportedRun] = {}
    for run in runs:
        other = by_id.setdefault(run.run_id, run)
        if other is run:
            continue
        first, second = sorted((other, run), key=_progress)
        by_id[run.run_id] = second
        notes.append(
            f"run {run.run_id} is there twice: {second.source} is used, {first.source} is not"
        )
    return list(by_id.values())


def _progress(run: ReportedRun) -> tuple[float, float]:
    return run.images or 0.0, run.wall_clock_s or 0.0
