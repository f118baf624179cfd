"""The report of runs, stages and grid jobs as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from report.curves import accuracy_table, learning_charts
from report.evaluation import Evaluation
from report.evaluation_html import evaluations_html
from report.html import (
    Section,
    charts_html,
    notes_html,
    render_page,
    table_html,
    tiles_html,
)
from report.phases import phase_table, sentences
from report.plots import Chart, foreign_chart, has_matplotlib, phase_chart, scaling_charts
from report.provenance import run_table, settings_tables
from report.runs import ReportedRun
from report.scaling import Study
from report.scaling_tables import scaling_table
from report.search.charts import search_charts
from report.search.importance import find_importances
from report.search.tables import importance_table, trial_table
from report.search.trials import Search, find_best
from report.stages import StageFigures, stage_table
from report.streams import stream_table
from report.table import Cell, Column, Table
from report.words import choose_device_time, count, name_sizes
from report.workflows import placement_table, workflow_table

if TYPE_CHECKING:
    from report.grid.replay import Replay
    from report.grid.report import GridReport

MAX_STUDIES = 20  # with pictures; further ones are in the tables only


@dataclass(frozen=True)
class Contents:
    """Everything that a page shows."""

    title: str
    runs: Sequence[ReportedRun] = ()
    studies: Sequence[Study] = ()
    epochs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    evaluations: Sequence[Evaluation] = ()
    stages: Sequence[StageFigures] = ()
    published_stages: Sequence[StageFigures] = ()
    grids: Sequence[GridReport] = ()
    replays: Sequence[Replay] = ()
    searches: Sequence[Search] = ()
    stage_records: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[str] = ()
    target_acc1: float | None = None
    made_by: str = ""


def build_page(contents: Contents) -> str:
    """The page's text."""
    notes = list(contents.notes)
    with_pictures = has_matplotlib()
    if not with_pictures:
        notes.append("no pictures: matplotlib is not installed here (pip install matplotlib)")
    sections = [
        Section("summary", "Summary", _summary(contents) + notes_html(notes, is_warning=True)),
        Section("scaling", "Scaling", _scaling(contents, with_pictures)),
        Section("time", "Where the time went", _time(contents, with_pictures)),
        Section("learning", "Loss and accuracy", _learning(contents, with_pictures)),
        Section("evaluation", "Evaluation", evaluations_html(contents.evaluations, with_pictures)),
        Section("search", "Search", _searches(contents, with_pictures)),
        Section("stages", "Stages", _stages(contents)),
        Section("grid", "Grid", _grid(contents, with_pictures)),
        Section("replay", "Replay", _replays(contents, with_pictures)),
        Section("provenance", "Provenance", _provenance(contents)),
    ]
    return render_page(contents.title, _lead(contents), sections, contents.made_by)


def _lead(contents: Contents) -> str:
    """What is on the page, counted."""
    counts = [
        (len(contents.runs), "run", "runs"),
        (len(contents.studies), "study", "studies"),
        (len(contents.searches), "search", "searches"),
        (sum(len(grid.jobs) for grid in contents.grids), "grid job", "grid jobs"),
    ]
    return ", ".join(f"{n} {one if n == 1 else many}" for n, one, many in counts if n)


def _summary(contents: Contents) -> str:
    """Big numbers, then each study in a sentence."""
    tiles = []
    done = [run for run in contents.runs if run.is_done]
    if contents.runs:
        tiles.append((f"{len(done)} of {len(contents.runs)}", "runs finished"))
    best = max((run.acc1 for run in done if run.acc1 is not None), default=None)
    if best is not None:
        tiles.append((f"{best:.2f} %", "best final val acc@1"))
    largest = _largest_point(contents.studies)
    if largest is not None:
        tiles.append(largest)
    hours = sum(run.gpu_hours or 0.0 for run in done)
    if hours:
        time = choose_device_time((run.gpu for run in done), [hours])
        words = time.heading if time.heading.startswith("GPU") else time.heading.lower()
        tiles.append((time.show(hours), words))
    for search in contents.searches:
        best_trial = find_best(search.trials, search.metric)
        if best_trial is not None:
            words = f"best {search.metric} of {count(len(search.trials), 'trial')}"
            tiles.append((f"{best_trial.value:.4g}", words))
    for grid in contents.grids:
        good = sum(job.succeeded for job in grid.jobs)
        tiles.append((f"{good} of {len(grid.jobs)}", "grid jobs succeeded"))
    lines = [
        f"{_study_name(study)}: {sentence}"
        for study in contents.studies[:MAX_STUDIES]
        for sentence in sentences(study)[:1]
    ]
    return tiles_html(tiles) + notes_html(lines)


def _largest_point(studies: Sequence[Study]) -> tuple[str, str] | None:
    """The efficiency of the largest size that was measured against a smaller one."""
    measured = [
        (point.num_gpus, point.efficiency_pct.mean, study)
        for study in studies
        for point in study.points
        if point.efficiency_pct and study.baseline and study.baseline.num_gpus < point.num_gpus
    ]
    if not measured:
        return None
    num_gpus, efficiency, study = max(measured, key=lambda item: item[0])
    return f"{efficiency:.1f} %", f"scaling efficiency on {num_gpus} {study.units}"


def _study_name(study: Study) -> str:
    return " ".join(word for word in (study.gpu, study.arch, study.mode) if word)


def _scaling(contents: Contents, with_pictures: bool) -> str:
    parts = []
    for index, study in enumerate(contents.studies):
        if with_pictures and index < MAX_STUDIES:
            parts.append(charts_html(_numbered(scaling_charts(study), index)))
        parts.append(table_html(scaling_table(study)))
    return "".join(parts)


def _time(contents: Contents, with_pictures: bool) -> str:
    charts, parts = [], []
    for index, study in enumerate(contents.studies):
        chart = phase_chart(study) if with_pictures and index < MAX_STUDIES else None
        charts += _numbered([chart] if chart else [], index)
        table = phase_table(study)
        if table is not None:
            parts.append(table_html(table, f"Phases, {_study_name(study)}"))
        fit = _fit_table(study)
        if fit is not None:
            parts.append(table_html(fit))
    streams = stream_table([(run.run_id, run.record) for run in contents.runs])
    if streams is not None:
        parts.append(table_html(streams))
    return charts_html(charts) + "".join(parts)


def _fit_table(study: Study) -> Table | None:
    """The fitted time of each size beside the measured one."""
    fit = study.fit
    if fit is None or len(fit.seconds) < 3:
        return None
    columns = (
        Column("num_gpus", name_sizes([study.gpu])),
        Column("measured_s", "Measured (s)"),
        Column("fitted_s", "Fitted (s)"),
        Column("residual_pct", "Residual (%)"),
        Column("fixed_share_pct", "Fixed cost (%)"),
    )
    rows = tuple(
        (
            Cell(f"{size:g}", size),
            Cell(f"{seconds:.1f}", seconds),
            Cell(f"{fit.predict(size):.1f}", fit.predict(size)),
            Cell(f"{residual:+.2f}", residual),
            Cell(
                f"{100 * fit.fixed_s / fit.predict(size):.1f}",
                100 * fit.fixed_s / fit.predict(size),
            ),
        )
        for size, seconds, residual in zip(
            fit.num_gpus, fit.seconds, fit.residuals_pct, strict=True
        )
    )
    caption = f"Fit of T(N) = a/N + b + c*log2(N), {_study_name(study)}"
    return Table("fit", caption, columns, rows)


def _learning(contents: Contents, with_pictures: bool) -> str:
    charts, note = learning_charts(contents.studies, contents.epochs) if with_pictures else ([], "")
    table = accuracy_table(contents.studies, contents.epochs, contents.target_acc1)
    body = charts_html(charts) + notes_html([note] if note else [])
    return body + (table_html(table) if table else "")


def _searches(contents: Contents, with_pictures: bool) -> str:
    parts = []
    for index, search in enumerate(contents.searches):
        importances = find_importances(search)
        if with_pictures and index < MAX_STUDIES:
            parts.append(charts_html(_numbered(search_charts(search, importances), index)))
        title = f"Trials of the search {search.name}"
        trials = trial_table(search.trials, search.metric, title).without_empty_columns()
        tables = [trials, importance_table(search, importances)]
        parts += [table_html(table) for table in tables if table is not None]
    return "".join(parts)


def _stages(contents: Contents) -> str:
    if not contents.stages:
        return ""
    table = stage_table(contents.stages, contents.published_stages)
    tables = [table] if table else []
    if contents.published_stages:
        tables += [workflow_table(contents.searches, contents.stage_records), placement_table()]
    return "".join(map(table_html, tables))


def _grid(contents: Contents, with_pictures: bool) -> str:
    """The tables and pictures of the grid report, loaded only when there are grid jobs."""
    if not contents.grids:
        return ""
    from report.grid.plots import (
        draw_completion_times,
        draw_failure_causes,
        draw_site_compute,
        draw_stall_times,
    )
    from report.grid.tables import make_tables

    draws = {
        "completion_time": draw_completion_times,
        "compute_per_site": draw_site_compute,
        "stall_time": draw_stall_times,
        "failure_causes": draw_failure_causes,
    }
    parts = []
    for index, grid in enumerate(contents.grids):
        charts = []
        for name, draw in draws.items():
            figure = draw(grid) if with_pictures else None
            if figure is not None:
                charts.append(foreign_chart(f"{name}-{index}", figure))
        parts.append(f"{charts_html(charts)}{''.join(map(table_html, make_tables(grid)))}")
    return "".join(parts)


def _replays(contents: Contents, with_pictures: bool) -> str:
    """Jobs of the grid with other ways to bring their data."""
    if not contents.replays:
        return ""
    from report.grid.plots import draw_replay
    from report.grid.replay import make_replay_tables

    parts = []
    for index, replay in enumerate(contents.replays):
        figures = draw_replay(replay) if with_pictures else []
        charts = [
            foreign_chart(f"replay-{index}-{place}", figure) for place, figure in enumerate(figures)
        ]
        tables = "".join(map(table_html, make_replay_tables(replay)))
        parts.append(f"{charts_html(charts)}{tables}")
    return "".join(parts)


def _provenance(contents: Contents) -> str:
    runs = run_table(contents.runs)
    tables = ([runs] if runs else []) + settings_tables(contents.runs)
    return "".join(map(table_html, tables))


def _numbered(charts: Sequence[Chart], index: int) -> list[Chart]:
    """Charts whose ids stay apart when several studies are on one page."""
    return [
        Chart(chart.name, chart.title, chart.svg.replace(f"{chart.name}-", f"{chart.name}{index}-"))
        for chart in charts
    ]
