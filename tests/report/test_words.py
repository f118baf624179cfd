"""One is one, a process is no GPU, short times are minutes, and a name is no formula."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from report.curves import accuracy_table, load_epochs
from report.grid.plots import draw_grid_charts
from report.grid.report import make_report
from report.grid.rows import GridJob
from report.grid.tables import make_slot_time_table
from report.runs import load_runs
from report.scaling import build_studies
from report.scaling_tables import scaling_table
from report.words import choose_unit, count, parse_counts, to_label
from tests.report.records import write_run


def headings(parent: Path, device: str, wall_clock_s: float) -> list[str]:
    for num_gpus in (1, 2):
        write_run(
            parent, f"{device}-{num_gpus}", num_gpus, device=device, wall_clock_s=wall_clock_s
        )
    runs, _ = load_runs([parent])
    studies = build_studies(runs)
    accuracy = accuracy_table(studies, load_epochs(runs)[0])
    assert accuracy is not None
    return [c.heading for table in (scaling_table(studies[0]), accuracy) for c in table.columns]


def test_one_is_singular() -> None:
    assert [count(n, "rank") for n in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert count(2, "process", "processes") == "2 processes"


def test_a_cpu_has_process_hours_and_a_gpu_has_gpu_hours(tmp_path: Path) -> None:
    cpu = headings(tmp_path / "cpu", "cpu", 9000.0)
    assert cpu.count("Process-hours") == cpu.count("#Processes") == 2
    assert not any("GPU" in heading for heading in cpu if heading != "GPU")
    gpu = headings(tmp_path / "gpu", "NVIDIA A100-SXM4-80GB", 9000.0)
    assert gpu.count("GPU-hours") == gpu.count("#GPUs") == 2


def test_less_than_an_hour_is_shown_in_minutes(tmp_path: Path) -> None:
    assert headings(tmp_path, "cpu", 90.0).count("Process-minutes") == 2
    job = GridJob("1.0", ("A",), "success", compute_s=240.0, slot_busy_s=240.0)
    table = make_slot_time_table(make_report("t", [job]))
    assert table.columns[1].heading == "minutes"
    assert table.rows[0][1].text == "4.0"
    assert [choose_unit(s).short for s in (7200, 600, 30)] == ["h", "min", "s"]


def test_a_name_that_looks_like_a_formula_is_drawn(tmp_path: Path) -> None:
    assert to_label("a$b") == r"a\$b"
    assert len(to_label("x" * 1000)) == 40
    job = GridJob("$\\frac{$", ("$\\frac{$",), "success", match_to_end_s=5.0, compute_s=5.0)
    many = [GridJob(f"{i}.0", (f"site{i}",), "success", match_to_end_s=1.0) for i in range(200)]
    assert draw_grid_charts(make_report("t", [job, *many]), tmp_path)


def test_counts_of_gpus_are_given_with_commas() -> None:
    assert parse_counts("8") == (8,)
    assert parse_counts("128,256") == (128, 256)


@pytest.mark.parametrize("text", ["", "0", "8,", "8 16", "8,-1", "many"])
def test_what_is_no_list_of_counts_is_named(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=f"'{text}' is not a list of GPU counts"):
        parse_counts(text)
