"""Scaling studies computed from runs: baselines, efficiencies, what differs, what is missing."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from report.differences import differences, flag_learning_rates, recipe_key
from report.fit import Interval, ScalingFit, fit_scaling
from report.runs import ReportedRun


@dataclass(frozen=True)
class Spread:
    """The mean of repeats and their standard deviation (None for a single run)."""

    mean: float
    std: float | None
    count: int


@dataclass(frozen=True)
class ScalingPoint:
    """One size of a study: its runs that are done, or the reason why there is none."""

    runs: tuple[ReportedRun, ...]
    done: tuple[ReportedRun, ...]
    mode: str  # weak, strong, mixed, or baseline
    wall_clock_s: Spread | None = None
    images_per_s: Spread | None = None
    steady_images_per_s: Spread | None = None
    efficiency_pct: Spread | None = None
    steady_efficiency_pct: Spread | None = None
    predicted_s: Interval | None = None
    predicted_efficiency_pct: Interval | None = None
    flags: tuple[str, ...] = ()

    @property
    def first(self) -> ReportedRun:
        return (self.done or self.runs)[0]

    @property
    def num_gpus(self) -> int:
        return self.first.num_gpus


@dataclass(frozen=True)
class Study:
    """Points that share a baseline, with the curve fitted through them."""

    gpu: str
    arch: str
    mode: str
    baseline: ScalingPoint | None
    points: tuple[ScalingPoint, ...]
    fit: ScalingFit | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def epochs(self) -> float | None:
        """Whole epochs of the baseline's run, to which every time of the fit refers."""
        epochs = self.baseline.first.epochs if self.baseline else None
        return epochs if epochs is not None and epochs >= 0.5 else None

    @property
    def unit(self) -> str:
        """What a table counts as #GPUs: on CPUs it is processes."""
        return "process" if self.gpu == "cpu" else "GPU"

    @property
    def units(self) -> str:
        return "processes" if self.gpu == "cpu" else "GPUs"


def build_studies(runs: Sequence[ReportedRun], predict: Sequence[int] = ()) -> list[Study]:
    """The studies in the runs: one for each device, model, baseline and way of scaling."""
    groups: dict[tuple[str, str, str], list[ReportedRun]] = defaultdict(list)
    for run in runs:
        groups[run.gpu, run.arch, str(run.config.get("image_size"))].append(run)
    return [
        study
        for _, group in sorted(groups.items(), key=lambda item: str(item[0]))
        for study in _studies_of_group(group, predict)
    ]


def _studies_of_group(runs: list[ReportedRun], predict: Sequence[int]) -> list[Study]:
    """Each baseline with the points that scale from it weakly, and those that do so strongly."""
    points = _group_repeats(runs)
    measured = [point for point in points if point.done]
    if not measured:
        return [Study(runs[0].gpu, runs[0].arch, "no finished run", None, tuple(points))]
    smallest = min(point.num_gpus for point in measured)
    baselines = [point for point in measured if point.num_gpus == smallest]
    families: dict[tuple[int, str], list[ScalingPoint]] = defaultdict(list)
    for point in points:
        if not any(point is baseline for baseline in baselines):
            index, mode = _choose_baseline(point, baselines)
            families[index, mode].append(replace(point, mode=mode))
    for index in range(len(baselines)):
        if not any(key[0] == index for key in families):
            families[index, "baseline"] = []
    return [
        _finish_study(baselines[index], mode, members, predict)
        for (index, mode), members in sorted(families.items())
    ]


def _group_repeats(runs: list[ReportedRun]) -> list[ScalingPoint]:
    """Runs of one size, batch and recipe are repeats of one point."""
    groups: dict[tuple[object, ...], list[ReportedRun]] = defaultdict(list)
    for run in runs:
        key = (run.num_gpus, run.num_nodes, run.batch_size, recipe_key(run))
        groups[key].append(run)
    return [
        _measure(ScalingPoint(tuple(group), tuple(run for run in group if run.is_done), "baseline"))
        for _, group in sorted(groups.items(), key=lambda item: item[0][:3])
    ]


def _measure(point: ScalingPoint) -> ScalingPoint:
    done = point.done
    return replace(
        point,
        wall_clock_s=_spread([run.wall_clock_s for run in done]),
        images_per_s=_spread([_end_to_end(run) for run in done]),
        steady_images_per_s=_spread([run.steady_images_per_s for run in done]),
    )


def _end_to_end(run: ReportedRun) -> float | None:
    """Images a second over the whole run, start-up and evaluation included."""
    return run.images / run.wall_clock_s if run.images and run.wall_clock_s else None


def _spread(values: Sequence[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    std = statistics.stdev(known) if len(known) > 1 else None
    return Spread(statistics.fmean(known), std, len(known))


def _choose_baseline(point: ScalingPoint, baselines: list[ScalingPoint]) -> tuple[int, str]:
    """The baseline with the same batch a GPU, else the same batch, else the most alike one."""
    modes = [_mode(point.first, baseline.first) for baseline in baselines]
    order = {"weak": 0, "strong": 1, "mixed": 2}
    best = min(
        range(len(baselines)),
        key=lambda i: (order[modes[i]], len(differences(point.first, baselines[i].first)), i),
    )
    return best, modes[best]


def _mode(run: ReportedRun, baseline: ReportedRun) -> str:
    if run.batch_size * baseline.num_gpus == baseline.batch_size * run.num_gpus:
        return "weak"
    return "strong" if run.batch_size == baseline.batch_size else "mixed"


def _finish_study(
    baseline: ScalingPoint, mode: str, members: list[ScalingPoint], predict: Sequence[int]
) -> Study:
    """The study with its efficiencies, its fit, and predictions for what is missing."""
    points = [baseline, *members]
    points += _wanted(baseline, mode, points, predict)
    points = [_with_efficiency(point, baseline) for point in points]
    measured = [point for point in points if point.done]
    fit = _fit_points(measured, baseline)
    points = [_with_prediction(point, baseline, fit) for point in points]
    flags = flag_learning_rates([point.first for point in points])
    points = [
        replace(point, flags=_flags(point, baseline, lr_flag))
        for point, lr_flag in zip(points, flags, strict=True)
    ]
    points.sort(key=lambda point: (point.num_gpus, point.first.batch_size))
    notes = _notes(measured, baseline, points, fit)
    return Study(baseline.first.gpu, baseline.first.arch, mode, baseline, tuple(points), fit, notes)


def _wanted(
    baseline: ScalingPoint, mode: str, points: Sequence[ScalingPoint], predict: Sequence[int]
) -> list[ScalingPoint]:
    """Points that were asked for by their GPU count alone."""
    run = baseline.first
    per_gpu, gpus_per_node = run.batch_size // run.num_gpus, run.num_gpus // run.num_nodes or 1
    largest = max((p.first for p in points), key=lambda r: r.num_gpus)
    gpus_per_node = max(gpus_per_node, largest.num_gpus // largest.num_nodes)
    have = {point.num_gpus for point in points}
    wanted = []
    for num_gpus in sorted(set(predict) - have):
        batch = run.batch_size if mode == "strong" else per_gpu * num_gpus
        missing = replace(
            run,
            run_id=f"predicted-{num_gpus}",
            status="missing",
            num_gpus=num_gpus,
            num_nodes=-(-num_gpus // gpus_per_node),
            batch_size=batch,
            lr=None,
            wall_clock_s=None,
            acc1=None,
            acc5=None,
        )
        wanted.append(ScalingPoint((missing,), (), mode))
    return wanted


def _with_efficiency(point: ScalingPoint, baseline: ScalingPoint) -> ScalingPoint:
    """Images a second a GPU, against the baseline's: T1 / (TN x N) when the images are equal."""
    base = _spread([_speed(run, baseline) for run in baseline.done])
    steady_base = baseline.steady_images_per_s
    assert base is not None, "a baseline is a point that is done"
    scale = 100 * baseline.num_gpus / point.num_gpus
    steady = [run.steady_images_per_s for run in point.done]
    return replace(
        point,
        efficiency_pct=_spread([scale * _speed(run, baseline) / base.mean for run in point.done]),
        steady_efficiency_pct=_spread([scale * s / steady_base.mean for s in steady if s])
        if steady_base
        else None,
    )


def _speed(run: ReportedRun, baseline: ScalingPoint) -> float:
    """Images a second, or runs a second where a published table does not count its images."""
    assert run.wall_clock_s is not None, "only runs that are done have a speed"
    if run.images is None or any(base.images is None for base in baseline.done):
        return 1 / run.wall_clock_s
    return run.images / run.wall_clock_s


def _fit_points(measured: Sequence[ScalingPoint], baseline: ScalingPoint) -> ScalingFit | None:
    """The curve through the mean time of each size, for the baseline's number of images."""
    by_size: dict[int, list[float]] = defaultdict(list)
    for point in measured:
        by_size[point.num_gpus] += [_comparable_s(run, baseline) for run in point.done]
    sizes = sorted(by_size)
    return fit_scaling(sizes, [statistics.fmean(by_size[size]) for size in sizes])


def _comparable_s(run: ReportedRun, baseline: ScalingPoint) -> float:
    """Wall clock of a run as if it had trained as many images as the baseline."""
    images = baseline.first.images
    return (images if images and run.images else 1.0) / _speed(run, baseline)


def _with_prediction(
    point: ScalingPoint, baseline: ScalingPoint, fit: ScalingFit | None
) -> ScalingPoint:
    if point.done or fit is None:
        return point
    interval = fit.predict_interval(point.num_gpus)
    base_s = statistics.fmean([_comparable_s(run, baseline) for run in baseline.done])
    base_gpu_s = 100 * base_s * baseline.num_gpus

    def efficiency(seconds: float | None) -> float | None:
        return base_gpu_s / (seconds * point.num_gpus) if seconds else None

    value = efficiency(interval.value)
    assert value is not None, "a fitted time is above 0"
    in_pct = Interval(value, efficiency(interval.high), efficiency(interval.low))
    return replace(point, predicted_s=interval, predicted_efficiency_pct=in_pct)


def _flags(point: ScalingPoint, baseline: ScalingPoint, lr_flag: str | None) -> tuple[str, ...]:
    """What a reader must know about a row."""
    flags = []
    if point.predicted_s is not None:
        flags.append("predicted")
    if not point.done:
        flags += sorted({run.status for run in point.runs} - {"missing"})
    if lr_flag:
        flags.append(lr_flag)
    if point.done:
        flags += differences(point.first, baseline.first)
        attempts = max(len(run.record.get("attempts") or []) for run in point.done)
        if attempts > 1:
            flags.append(f"{attempts} attempts")
    return tuple(flags)


def _notes(
    measured: Sequence[ScalingPoint],
    baseline: ScalingPoint,
    points: Sequence[ScalingPoint],
    fit: ScalingFit | None,
) -> tuple[str, ...]:
    notes = []
    if len({point.num_gpus for point in measured}) == 1:
        notes.append("only one size was measured; scaling efficiency needs at least two")
    if baseline.num_gpus > 1:
        units = "processes" if baseline.first.gpu == "cpu" else "GPUs"
        notes.append(f"the baseline is {baseline.num_gpus} {units}, not 1: no smaller size was run")
    if any(point.predicted_s for point in points) and fit is not None and len(fit.seconds) < 3:
        notes.append("predicted from only two sizes, so there is no interval")
    return tuple(notes)
