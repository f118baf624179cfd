"""The four pictures are drawn, and say what the jobs say."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.patches import Rectangle

from report.grid.jobs import WAITING
from report.grid.osg_study import read_study
from report.grid.plots import draw_grid_charts, draw_stall_times
from report.grid.report import make_report
from report.grid.rows import GridJob

STUDY = Path(__file__).resolve().parents[3] / "run_results/published/osg_100_jobs_5_epochs.csv"
NAMES = {"completion_time", "compute_per_site", "stall_time", "failure_causes"}


def test_four_pictures_as_png_and_svg(tmp_path: Path) -> None:
    files = draw_grid_charts(make_report("study", read_study(STUDY)), tmp_path)
    assert {file.name for file in files} == {f"{n}.{s}" for n in NAMES for s in ("png", "svg")}
    assert all(file.read_bytes()[:4] == b"\x89PNG" for file in files if file.suffix == ".png")


def test_the_same_report_gives_the_same_bytes(tmp_path: Path) -> None:
    report = make_report("pilot", read_study(STUDY.with_name("osg_5_epochs_pilot.csv")))
    for name in ("one", "two"):
        draw_grid_charts(report, tmp_path / name)
    for file in (tmp_path / "one").glob("*.svg"):
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()


def test_the_worst_job_stands_first_and_every_loser_has_a_bar() -> None:
    canvas = draw_stall_times(make_report("study", read_study(STUDY)))
    assert canvas is not None
    (axes,) = canvas.axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels[0] == "794570.003.000"  # over 129,000 s, the study says
    longest = axes.patches[0]
    assert isinstance(longest, Rectangle)
    assert longest.get_width() == pytest.approx(129_015 / 3600)
    assert len(axes.patches) == 33


def test_nothing_to_show_is_no_picture(tmp_path: Path) -> None:
    waiting = GridJob("1.000.000", (), WAITING)
    assert draw_grid_charts(make_report("empty", [waiting]), tmp_path) == []
