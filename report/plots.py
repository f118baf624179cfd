"""The pictures of the page, drawn by matplotlib as SVG whose colours follow the page's theme."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from report.phases import PHASE_NAMES, phase_shares
from report.scaling import ScalingPoint, Study
from report.words import to_label
from train.records.record import PHASES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Each colour is a stand-in that the SVG text exchanges for a variable of the page's style sheet.
INK, GRID = "#010203", "#010204"
SERIES = tuple(f"#0102{10 + i:02d}" for i in range(8))
_VARIABLES = {INK: "currentColor", GRID: "var(--grid)"} | {
    colour: f"var(--c{i})" for i, colour in enumerate(SERIES)
}
_FOREIGN = {"#000000": "currentColor", "#666666": "currentColor", "#dddddd": "var(--grid)"}
WIDTH_IN, HEIGHT_IN = 4.7, 3.3


@dataclass(frozen=True)
class Curve:
    """A line of a chart by epoch."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Chart:
    """A picture for the page: its title, its SVG, and what it says for those who cannot see it."""

    name: str
    title: str
    svg: str


def has_matplotlib() -> bool:
    """Whether pictures can be drawn here."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def scaling_charts(study: Study) -> list[Chart]:
    """Speed-up and efficiency against the ideal, with error bars, prediction and fit."""
    points = [point for point in study.points if point.efficiency_pct or point.predicted_s]
    if study.baseline is None or len(points) < 2:
        return []
    return [_efficiency_chart(study, points), _speedup_chart(study, points)]


def _efficiency_chart(study: Study, points: Sequence[ScalingPoint]) -> Chart:
    figure, axes = new_figure()
    _log2_axis(axes, study, [point.num_gpus for point in points])
    axes.axhline(100, color=GRID, linestyle="--", label="ideal")
    _draw_points(axes, [(p, _spread(p, 1.0)) for p in points if p.done], SERIES[0], "end to end")
    steady = [(p.num_gpus, p.steady_efficiency_pct.mean) for p in points if p.steady_efficiency_pct]
    if steady:
        axes.plot(*zip(*steady, strict=True), "s:", color=SERIES[1], label="steady state")
    _draw_predictions(axes, points, 1.0)
    axes.set_ylim(0, max(110.0, *axes.get_ylim()))
    axes.set_ylabel("scaling efficiency (%)")
    return finish_chart(figure, axes, "efficiency", f"Scaling efficiency, {_name(study)}")


def _speedup_chart(study: Study, points: Sequence[ScalingPoint]) -> Chart:
    baseline = study.baseline
    assert baseline is not None, "drawn only for a study with a baseline"
    figure, axes = new_figure()
    sizes = [point.num_gpus for point in points]
    _log2_axis(axes, study, sizes)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ideal = [size / baseline.num_gpus for size in (min(sizes), max(sizes))]
    axes.plot([min(sizes), max(sizes)], ideal, "--", color=GRID, label="ideal")
    measured = [(p, _spread(p, p.num_gpus / baseline.num_gpus / 100)) for p in points if p.done]
    _draw_points(axes, measured, SERIES[0], "end to end")
    if study.fit is not None and len(study.fit.seconds) > 2:
        base_s = study.fit.predict(baseline.num_gpus)
        steps = [min(sizes) * (max(sizes) / min(sizes)) ** (i / 40) for i in range(41)]
        fitted = [base_s / study.fit.predict(size) for size in steps]
        axes.plot(steps, fitted, "-", color=SERIES[2], linewidth=1, label="fit")
    _draw_predictions(axes, points, 1 / (100 * baseline.num_gpus), by_size=True)
    axes.set_ylabel(f"speed-up over {baseline.num_gpus} {study.unit}")
    return finish_chart(figure, axes, "speedup", f"Speed-up, {_name(study)}")


def phase_chart(study: Study) -> Chart | None:
    """The phases of each point as a stacked bar of its wall clock."""
    shares = [(point, phase_shares(point)) for point in study.points]
    shares = [(point, phases) for point, phases in shares if phases]
    if not shares:
        return None
    figure, axes = new_figure()
    labels = [str(point.num_gpus) for point, _ in shares]
    left = [0.0] * len(shares)
    for name, colour in zip(PHASES, SERIES, strict=False):
        width = [100 * phases[name] / (sum(phases.values()) or 1) for _, phases in shares]
        axes.barh(range(len(shares)), width, 0.6, left, color=colour, label=PHASE_NAMES[name])
        left = [a + b for a, b in zip(left, width, strict=True)]
    axes.set_yticks(range(len(shares)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_ylabel(study.units)
    axes.set_xlabel("share of the wall clock (%)")
    return finish_chart(figure, axes, "phases", f"Where the time went, {_name(study)}", columns=4)


def curve_chart(name: str, title: str, ylabel: str, curves: Sequence[Curve]) -> Chart | None:
    """Lines by epoch; at most as many as there are colours get a name in the legend."""
    if not curves:
        return None
    figure, axes = new_figure()
    for index, curve in enumerate(curves):
        label = to_label(curve.label) if index < len(SERIES) else None
        marker = "o-" if len(curve.x) < 20 else "-"
        axes.plot(curve.x, curve.y, marker, color=SERIES[index % len(SERIES)], label=label, ms=3)
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("epoch")
    axes.set_ylabel(ylabel)
    return finish_chart(figure, axes, name, title, columns=2)


def foreign_chart(name: str, figure: Figure) -> Chart:
    """A figure that was drawn elsewhere, in the page's ink and readable on a phone."""
    title = " ".join(axes.get_title() for axes in figure.axes) or name.replace("_", " ")
    figure.patch.set_alpha(0)
    for axes in figure.axes:
        axes.set_title("")
        axes.patch.set_alpha(0)
        legend = axes.get_legend()
        if legend is not None:
            legend.get_frame().set_alpha(0)
    figure.set_size_inches(min(WIDTH_IN + 0.8, figure.get_figwidth()), figure.get_figheight())
    svg = _to_svg(figure, name)
    for colour, variable in _FOREIGN.items():
        svg = svg.replace(f": {colour}", f": {variable}")
    return Chart(name, title, _label(svg, title))


def _name(study: Study) -> str:
    return " ".join(word for word in (study.gpu, study.arch, f"({study.mode})") if word)


def _spread(point: ScalingPoint, factor: float) -> tuple[float, float]:
    """Value and error bar of a measured point, from its efficiency."""
    efficiency = point.efficiency_pct
    assert efficiency is not None, "a point that is done has an efficiency"
    return efficiency.mean * factor, (efficiency.std or 0.0) * factor


def _draw_points(
    axes: Axes, points: Sequence[tuple[ScalingPoint, tuple[float, float]]], colour: str, label: str
) -> None:
    sizes = [point.num_gpus for point, _ in points]
    values, errors = zip(*(spread for _, spread in points), strict=True)
    shown = errors if any(errors) else None
    axes.errorbar(sizes, values, yerr=shown, fmt="o-", color=colour, label=label, capsize=3)


def _draw_predictions(
    axes: Axes, points: Sequence[ScalingPoint], factor: float, by_size: bool = False
) -> None:
    """Hollow marks with the range of each prediction."""
    for index, point in enumerate(p for p in points if p.predicted_efficiency_pct):
        interval = point.predicted_efficiency_pct
        assert interval is not None, "filtered above"
        scale = factor * (point.num_gpus if by_size else 1)
        errors = None
        if interval.low is not None and interval.high is not None:
            errors = [
                [(interval.value - interval.low) * scale],
                [(interval.high - interval.value) * scale],
            ]
        axes.errorbar(
            [point.num_gpus], [interval.value * scale], yerr=errors, fmt="D", color=SERIES[3],
            markerfacecolor="none", capsize=3, label=None if index else "predicted",
        )  # fmt: skip


def _log2_axis(axes: Axes, study: Study, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(set(sizes)), [str(size) for size in sorted(set(sizes))])
    axes.minorticks_off()
    axes.set_xlabel(study.units)


def new_figure() -> tuple[Figure, Axes]:
    """An empty picture in the page's ink."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    axes.spines[["top", "right"]].set_visible(False)
    for spine in axes.spines.values():
        spine.set_color(INK)
    axes.tick_params(colors=INK)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    axes.grid(True, color=GRID, linewidth=0.5)
    axes.set_axisbelow(True)
    return figure, axes


def finish_chart(figure: Figure, axes: Axes, name: str, title: str, columns: int = 2) -> Chart:
    """The chart with its legend below, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles, labels, loc="outside lower center", ncols=columns, frameon=False,
            labelcolor=INK, fontsize="small",
        )  # fmt: skip
    return Chart(name, title, _label(_to_svg(figure, name), title))


def _to_svg(figure: Figure, name: str) -> str:
    """The SVG element alone, with its colours as variables and ids of its own."""
    import matplotlib

    buffer = io.StringIO()
    # Text stays text: the page's font, searchable, and small.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata=_NO_METADATA)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: [^;\"]*", "font-family: inherit", svg)
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg


_NO_METADATA: Mapping[str, None] = dict.fromkeys(("Date", "Creator", "Format", "Type"))


def _label(svg: str, title: str) -> str:
    """The SVG as wide as its place, with a text for screen readers."""
    svg = re.sub(r'<svg([^>]*?) width="[^"]*"', r"<svg\1", svg, count=1)
    svg = re.sub(r'<svg([^>]*?) height="[^"]*"', r"<svg\1", svg, count=1)
    safe = title.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return svg.replace("<svg", f'<svg role="img" aria-label="{safe}"', 1)
