"""How runs learned: loss and accuracy by epoch, and the time that a given accuracy took."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from report.plots import Chart, Curve, curve_chart
from report.record_shape import is_number
from report.runs import ReportedRun
from report.scaling import Study
from report.table import Cell, Column, Table
from report.words import DeviceTime, choose_device_time, count, name_sizes
from train.records.record import EPOCHS_FILE, iter_lines, read_epochs

MAX_CURVES = 8
MAX_EPOCH = 10**7

Epochs = Mapping[str, Sequence[Mapping[str, Any]]]


def load_epochs(runs: Sequence[ReportedRun]) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """The epochs of each run by its id, and notes on files that cannot be used."""
    epochs: dict[str, list[dict[str, Any]]] = {}
    notes = []
    for run in runs:
        if run.epoch_lines is not None:
            epochs[run.run_id] = [_shape_epoch(line) for line in run.epoch_lines]
            continue
        if not run.record:
            continue
        path = Path(run.source) / EPOCHS_FILE
        try:
            num_odd = sum(line is None or not _is_epoch(line) for line in iter_lines(path))
            lines = [_shape_epoch(line) for line in read_epochs(Path(run.source))]
        except OSError as error:
            notes.append(f"{path} cannot be read ({error.strerror}); its curves are left out")
            continue
        epochs[run.run_id] = [line for line in lines if _is_epoch(line)]
        if num_odd:
            notes.append(f"{path}: {count(num_odd, 'torn line')} left out")
    return epochs, notes


def _is_epoch(line: Mapping[str, Any]) -> bool:
    return type(line.get("epoch")) is int and 0 <= line["epoch"] < MAX_EPOCH


def _shape_epoch(line: Mapping[str, Any]) -> dict[str, Any]:
    """An epoch with its numbers alone; what has another type counts as absent."""
    return {name: value for name, value in line.items() if is_number(value)}


def learning_charts(studies: Sequence[Study], epochs: Epochs) -> tuple[list[Chart], str]:
    """Loss and accuracy of one run of each point, and a note on the runs that are not drawn."""
    runs = [run for run in _one_run_a_point(studies) if epochs.get(run.run_id)]
    drawn = runs[:MAX_CURVES]
    charts = [
        curve_chart("loss", "Training loss", "training loss", _curves(drawn, epochs, "train_loss")),
        curve_chart(
            "accuracy", "Validation accuracy", "val acc@1 (%)", _curves(drawn, epochs, "val_acc1")
        ),
    ]
    total = sum(1 for value in epochs.values() if value)
    note = (
        f"{len(drawn)} of {count(total, 'run')} drawn: one of each size."
        if total > len(drawn)
        else ""
    )
    return [chart for chart in charts if chart is not None], note


def _one_run_a_point(studies: Sequence[Study]) -> list[ReportedRun]:
    runs: dict[str, ReportedRun] = {}
    for study in studies:
        for point in study.points:
            runs.setdefault(point.first.run_id, point.first)
    return list(runs.values())


def _curves(runs: Sequence[ReportedRun], epochs: Epochs, key: str) -> list[Curve]:
    curves = []
    labels = [f"{run.num_gpus} x {run.gpu}, batch {run.batch_size}" for run in runs]
    for run, size in zip(runs, labels, strict=True):
        lines = [line for line in epochs[run.run_id] if key in line]
        if lines:
            label = size if labels.count(size) == 1 else f"{size}, {run.run_id}"
            x = [float(line["epoch"]) + 1 for line in lines]
            curves.append(Curve(label, x, [float(line[key]) for line in lines]))
    return curves


def accuracy_table(
    studies: Sequence[Study], epochs: Epochs, target: float | None = None
) -> Table | None:
    """Seconds and device-hours until each point first reached the target accuracy.

    Without a target it is the highest whole per cent that every finished run reached.
    """
    runs = [run for run in _one_run_a_point(studies) if run.is_done and epochs.get(run.run_id)]
    best = [max((_accuracy(line) for line in epochs[run.run_id]), default=0.0) for run in runs]
    goal = target if target is not None else float(math.floor(min(best, default=0.0)))
    if not runs or goal <= 0:
        return None
    devices = [run.gpu for run in runs]
    reached = [time_to_accuracy(epochs[run.run_id], goal) for run in runs]
    spent = [r[0] * run.num_gpus / 3600 for run, r in zip(runs, reached, strict=True) if r]
    time = choose_device_time(devices, spent)
    columns = (
        Column("gpu", "GPU", is_number=False),
        Column("num_gpus", name_sizes(devices)),
        Column("batch_size", "Batch Size"),
        Column("seconds", "Time (s)"),
        Column("gpu_hours", time.heading),
        Column("epoch", "Epochs"),
        Column("best_acc1", "Best Acc@1"),
    )
    rows = tuple(
        _row(run, reached_at, top, time)
        for run, reached_at, top in zip(runs, reached, best, strict=True)
    )
    notes = ("Training and validation time; the start-up of the job is not part of it.",)
    return Table("time_to_accuracy", f"Time to {goal:g} % val acc@1", columns, rows, (), notes)


def time_to_accuracy(lines: Sequence[Mapping[str, Any]], target: float) -> tuple[float, int] | None:
    """(seconds, epochs) until the target was first reached, or None."""
    seconds = 0.0
    for line in lines:
        seconds += float(line.get("seconds") or 0.0) + float(line.get("eval_s") or 0.0)
        if _accuracy(line) >= target:
            return seconds, int(line["epoch"]) + 1
    return None


def _accuracy(line: Mapping[str, Any]) -> float:
    return float(line.get("val_acc1") or 0.0)


def _row(
    run: ReportedRun, reached: tuple[float, int] | None, best: float, time: DeviceTime
) -> tuple[Cell, ...]:
    seconds, epoch = reached or (None, None)
    hours = None if seconds is None else seconds * run.num_gpus / 3600
    return (
        Cell(run.gpu, run.gpu),
        Cell(str(run.num_gpus), run.num_gpus),
        Cell(str(run.batch_size), run.batch_size),
        Cell("not reached" if seconds is None else f"{seconds:.1f}", seconds),
        Cell(time.show(hours), hours),
        Cell("" if epoch is None else str(epoch), epoch),
        Cell(f"{best:.2f}", best),
    )
