"""Where the time of each point went: phases of the records, and the fitted curve in plain words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from report.scaling import ScalingPoint, Study
from report.table import Cell, Column, Table
from report.words import name_sizes
from train.records.record import PHASES

PHASE_NAMES = {
    "startup": "start-up",
    "data_wait": "data wait",
    "compute": "compute",
    "communication": "communication",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
    "other": "other",
}


def phase_shares(point: ScalingPoint) -> dict[str, float]:
    """Seconds of each phase of a point: the mean over ranks, then over repeats."""
    totals: dict[str, float] = defaultdict(float)
    recorded = [run for run in point.done if run.record.get("phases")]
    for run in recorded:
        for name in PHASES:
            totals[name] += float((run.record["phases"].get(name) or {}).get("mean_s") or 0.0)
    return {name: totals[name] / len(recorded) for name in PHASES} if recorded else {}


def lost_by_phase(point: ScalingPoint, baseline: ScalingPoint) -> Mapping[str, float]:
    """Percentage points of the baseline's time that each phase adds for the same work.

    GPU seconds an image, phase by phase, minus the baseline's: they add up to
    100 x (1 / efficiency - 1).
    """
    here, there = _phase_cost(point), _phase_cost(baseline)
    whole = sum(there.values())
    if not here or not whole:
        return {}
    return {name: 100 * (here[name] - there[name]) / whole for name in PHASES}


def _phase_cost(point: ScalingPoint) -> dict[str, float]:
    """GPU seconds an image of each phase, over the repeats."""
    images = sum(run.images or 0.0 for run in point.done)
    shares = phase_shares(point)
    if not images or not shares:
        return {}
    scale = point.num_gpus * len(point.done) / images
    return {name: seconds * scale for name, seconds in shares.items()}


def phase_table(study: Study) -> Table | None:
    """Seconds and shares of the phases, a row for each point that has them."""
    points = [point for point in study.points if phase_shares(point)]
    if not points:
        return None
    columns = (
        Column("num_gpus", name_sizes([study.gpu])),
        *(Column(name, PHASE_NAMES[name] + " (s)") for name in PHASES),
        Column("total", "total (s)"),
    )
    rows, data = [], []
    for point in points:
        shares = phase_shares(point)
        total = sum(shares.values()) or 1.0
        cells = [
            Cell(f"{shares[name]:.1f} ({100 * shares[name] / total:.0f} %)", shares[name])
            for name in PHASES
        ]
        rows.append(
            (Cell(str(point.num_gpus), point.num_gpus), *cells, Cell(f"{total:.1f}", total))
        )
        data.append({"num_gpus": point.num_gpus, **shares, "total": total})
    methods = {str(run.record.get("communication_method")) for p in points for run in p.done}
    notes = tuple(f"communication: {m}" for m in sorted(methods - {"None", ""}))
    return Table("phases", "Where the time went", columns, tuple(rows), tuple(data), notes)


def sentences(study: Study) -> list[str]:
    """The study in plain words: the fixed cost that the fit found, and what grew.

    Two sizes fit any curve of two terms, so nothing is said about it.
    """
    found = []
    if study.fit is not None and len(study.fit.seconds) > 2:
        found += [_fit_sentence(study), _residual_sentence(study)]
    lost = _lost_sentence(study)
    return found + ([lost] if lost else [])


def _fit_sentence(study: Study) -> str:
    """One sentence: which share of the largest point more GPUs cannot shorten."""
    fit = study.fit
    assert fit is not None, "called with a fit"
    largest = int(max(fit.num_gpus))
    unit, count = ("epoch", study.epochs) if study.epochs else ("run", 1.0)
    whole = fit.predict(largest)
    whose, parts = f" of the {largest}-{study.unit} {unit}", []
    if fit.fixed_s / whole >= 0.005:
        share = 100 * fit.fixed_s / whole
        seconds = _seconds(fit.fixed_s / count)
        parts.append(f"{share:.0f} %{whose} is a fixed cost of {seconds}")
    doubling_s = whole - fit.fixed_s - fit.divided_s / largest
    if fit.per_doubling_s > 0:
        share, seconds = 100 * doubling_s / whole, _seconds(fit.per_doubling_s / count)
        whose = "" if parts else whose
        parts.append(f"{share:.0f} %{whose} grows by {seconds} with each doubling")
    if not parts:
        return f"No fixed cost shows: the {largest}-{study.unit} {unit} is all work that divides."
    divided = _seconds(fit.divided_s / count)
    return f"{' and '.join(parts)}; the work that divides is {divided} on one {study.unit}."


def _residual_sentence(study: Study) -> str:
    fit = study.fit
    assert fit is not None, "called with a fit"
    unit, count = ("epoch", study.epochs) if study.epochs else ("run", 1.0)
    terms = [f"{_number(fit.divided_s / count)}/N", _number(fit.fixed_s / count)]
    if fit.per_doubling_s > 0:
        terms.append(f"{_number(fit.per_doubling_s / count)}*log2(N)")
    worst = max(abs(residual) for residual in fit.residuals_pct)
    curve = " + ".join(terms)
    return f"T_{unit}(N) = {curve} s fits the {len(fit.seconds)} sizes within {worst:.1f} %."


def _lost_sentence(study: Study) -> str | None:
    """Which phases make up the loss of the largest measured point, and which made up for some."""
    measured = [point for point in study.points if point.done]
    if study.baseline is None or len(measured) < 2:
        return None
    point = measured[-1]
    lost = lost_by_phase(point, study.baseline)
    changes = [(PHASE_NAMES[name], value) for name, value in lost.items() if abs(value) >= 1.0]
    if not any(value > 0 for _, value in changes):
        return None
    changes.sort(key=lambda change: -abs(change[1]))
    total = sum(lost.values())
    rest = round(total, 1) - sum(round(value, 1) for _, value in changes)
    if abs(rest) >= 0.05:  # so that a reader who adds them up gets the total
        changes.append(("the rest", rest))
    words = ", ".join(f"{name} {value:+.1f}" for name, value in changes)
    amount = f"{abs(total):.1f} % {'more' if total >= 0 else 'less'} {study.unit} time"
    return (
        f"For the same images the {point.num_gpus}-{study.unit} run needs {amount} than the "
        f"baseline (change by phase, in percentage points: {words})."
    )


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"


def _seconds(seconds: float) -> str:
    return f"{_number(seconds)} s"
