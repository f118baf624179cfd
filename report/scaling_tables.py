"""The scaling table with the published columns: text for people, data for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from report.fit import Interval
from report.phases import sentences
from report.published_table import cite
from report.scaling import ScalingPoint, Spread, Study
from report.table import Cell, Column, Table, Value
from report.words import DeviceTime, choose_device_time, name_sizes

COLUMNS = (
    Column("gpu", "GPU", is_number=False),
    Column("batch_size", "Batch Size"),
    Column("num_nodes", "#N"),
    Column("num_gpus", "#GPUs"),
    Column("lr", "LR"),
    Column("wall_clock_s", "WCT (s)"),
    Column("wall_clock_hms", "WCT (h:m:s)"),
    Column("val_acc1", "Val Acc@1"),
    Column("val_acc5", "Val Acc@5"),
    Column("scaling_efficiency_pct", "Scaling Efficiency"),
    Column("steady_efficiency_pct", "Steady Efficiency"),
    Column("images_per_s", "Images/s"),
    Column("gpu_hours", "GPU-hours"),
    Column("note", "Note", is_number=False),
)
PUBLISHED_COLUMNS = tuple(column.key for column in COLUMNS[:10])


def scaling_table(study: Study) -> Table:
    """The study as a table; a predicted value is in italics with its 95 % range."""
    time = choose_device_time([study.gpu], map(_gpu_hours, study.points))
    rows = tuple(_cells(point, time) for point in study.points)
    data = tuple(_data(point) for point in study.points)
    notes = (*sentences(study), *study.notes, *_citations(study))
    table = Table("scaling", _caption(study), _columns(study, time), rows, data, notes)
    return table.without_empty_columns(keep=PUBLISHED_COLUMNS)


def _citations(study: Study) -> list[str]:
    """Who published the rows that come from a table; they are named FILE.csv:LINE."""
    rows = (run for point in study.points for run in point.runs if not run.record)
    files = dict.fromkeys(run.source.rpartition(":")[0] for run in rows)
    return [text for file in files if (text := cite(Path(file)))]


def _columns(study: Study, time: DeviceTime) -> tuple[Column, ...]:
    """The columns, in the words of the study's device."""
    words = {"num_gpus": name_sizes([study.gpu]), "gpu_hours": time.heading}
    return tuple(replace(c, heading=words.get(c.key, c.heading)) for c in COLUMNS)


def _caption(study: Study) -> str:
    modes = {
        "weak": f"weak scaling (the batch of a {study.unit} is constant)",
        "strong": "strong scaling (the global batch is constant)",
        "mixed": "neither weak nor strong scaling: the batch sizes follow no rule",
        "baseline": "one size only",
    }
    words = [study.gpu, study.arch, modes.get(study.mode, study.mode)]
    if study.baseline is not None and study.baseline.num_gpus > 1:
        words.append(f"baseline {study.baseline.num_gpus} {study.units}")
    return ", ".join(word for word in words if word)


def _cells(point: ScalingPoint, time: DeviceTime) -> tuple[Cell, ...]:
    run = point.first
    acc1, acc5 = _accuracies(point)
    hours = _gpu_hours(point)
    return (
        Cell(run.gpu, run.gpu),
        Cell(str(run.batch_size), run.batch_size),
        Cell(str(run.num_nodes), run.num_nodes),
        Cell(str(run.num_gpus), run.num_gpus),
        Cell("" if run.lr is None else f"{run.lr:g}", run.lr),
        *_time_cells(point),
        _cell(acc1, 3),
        _cell(acc5, 3),
        _efficiency_cell(point),
        _cell(point.steady_efficiency_pct, 2, "%"),
        _cell(point.images_per_s, _decimals(point.images_per_s)),
        Cell(time.show(hours), hours),
        Cell("; ".join(point.flags), "; ".join(point.flags)),
    )


def _time_cells(point: ScalingPoint) -> tuple[Cell, Cell]:
    """Wall clock in seconds and as h:m:s, measured or predicted."""
    if point.predicted_s is not None:
        value = point.predicted_s.value
        return Cell(_range(point.predicted_s, 0), value), Cell(f"*{to_hms(value)}*", value)
    if point.wall_clock_s is None:
        return Cell(""), Cell("")
    seconds = point.wall_clock_s
    return _cell(seconds, _decimals(seconds)), Cell(to_hms(seconds.mean), seconds.mean)


def _efficiency_cell(point: ScalingPoint) -> Cell:
    predicted = point.predicted_efficiency_pct
    if predicted is not None:
        return Cell(_range(predicted, 1, " %"), predicted.value)
    return _cell(point.efficiency_pct, 2, "%")


def _cell(spread: Spread | None, decimals: int, unit: str = "") -> Cell:
    """A mean with the spread of its repeats."""
    if spread is None:
        return Cell("")
    std = "" if spread.std is None else f" ± {spread.std:.{max(decimals, 1)}f}"
    return Cell(f"{spread.mean:.{decimals}f}{std}{unit}", spread.mean)


def _data(point: ScalingPoint) -> dict[str, Value]:
    """The row of the CSV: the ten published columns as they are published, then ours."""
    run, seconds, efficiency = point.first, point.wall_clock_s, point.efficiency_pct
    acc1, acc5 = _accuracies(point)
    published: dict[str, Value] = {
        "gpu": run.gpu,
        "batch_size": run.batch_size,
        "num_nodes": run.num_nodes,
        "num_gpus": run.num_gpus,
        "lr": "" if run.lr is None else f"{run.lr:g}",
        "wall_clock_s": _plain(seconds, _decimals(seconds)),
        "wall_clock_hms": to_hms(seconds.mean) if seconds else "",
        "val_acc1": _plain(acc1, 3),
        "val_acc5": _plain(acc5, 3),
        "scaling_efficiency_pct": _plain(efficiency, 2),
    }
    ours: dict[str, Value] = {
        "steady_efficiency_pct": _plain(point.steady_efficiency_pct, 2),
        "images_per_s": _plain(point.images_per_s, 3),
        "steady_images_per_s": _plain(point.steady_images_per_s, 3),
        "gpu_hours": _rounded(_gpu_hours(point), 4),
        "num_repeats": len(point.done),
        "wall_clock_std_s": _rounded(seconds.std if seconds else None, 3),
        "efficiency_std_pct": _rounded(efficiency.std if efficiency else None, 3),
        "scaling": point.mode,
        "arch": run.arch,
        "run_ids": " ".join(r.run_id for r in point.done) if run.record else "",
        "note": "; ".join(point.flags),
    }
    predicted = _interval_data("predicted{}_s", point.predicted_s, 1)
    in_pct = _interval_data("predicted_efficiency{}_pct", point.predicted_efficiency_pct, 2)
    return published | ours | predicted | in_pct


def _interval_data(name: str, interval: Interval | None, decimals: int) -> dict[str, Value]:
    value, low, high = (interval.value, interval.low, interval.high) if interval else (None,) * 3
    ends = {"": value, "_low": low, "_high": high}
    return {name.format(end): _rounded(number, decimals) for end, number in ends.items()}


def to_hms(seconds: float) -> str:
    """Hours, minutes and seconds: 36:01:26."""
    whole = round(seconds)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _accuracies(point: ScalingPoint) -> tuple[Spread | None, Spread | None]:
    return _mean_of([run.acc1 for run in point.done]), _mean_of([run.acc5 for run in point.done])


def _mean_of(values: Sequence[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return Spread(sum(known) / len(known), None, len(known)) if known else None


def _gpu_hours(point: ScalingPoint) -> float | None:
    hours = _mean_of([run.gpu_hours for run in point.done])
    return hours.mean if hours else None


def _decimals(spread: Spread | None) -> int:
    """Whole seconds for long runs, as published; a tenth where a second is much."""
    return 0 if spread is None or spread.mean >= 1000 or spread.mean.is_integer() else 1


def _range(interval: Interval, decimals: int, unit: str = "") -> str:
    value = f"{interval.value:.{decimals}f}"
    if interval.low is None or interval.high is None:
        return f"*{value}{unit}*"
    return f"*{value} ({interval.low:.{decimals}f}–{interval.high:.{decimals}f}){unit}*"


def _plain(spread: Spread | None, decimals: int) -> str:
    return "" if spread is None else f"{spread.mean:.{decimals}f}"


def _rounded(value: float | None, decimals: int) -> Value:
    return None if value is None else round(value, decimals)
