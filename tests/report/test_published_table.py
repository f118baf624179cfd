"""Every published table names its source: in sources.csv, in its README and under the tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from report.grid.osg_study import read_study
from report.grid.report import make_report
from report.grid.tables import make_outcome_table
from report.published_table import SOURCES_FILE, cite, read_csv
from report.runs import load_runs
from report.scaling import build_studies
from report.scaling_tables import scaling_table
from report.stages import read_published_stages, stage_table
from tests.report.records import KEMPNER, PUBLISHED

TABLES = sorted(
    path.name for path in PUBLISHED.glob("*.csv") if not path.name.endswith("_printed.csv")
)
ROWS = {row["file"]: row for _, row in read_csv(PUBLISHED / SOURCES_FILE, ("file",))}


@pytest.mark.parametrize("name", [name for name in TABLES if name != SOURCES_FILE])
def test_a_published_table_has_authors_title_and_place(name: str) -> None:
    text = cite(PUBLISHED / name)
    assert all(ROWS[name][column] in text for column in ("authors", "title", "published_in"))
    assert all(ROWS[name].values())
    (line,) = [
        line
        for line in (PUBLISHED / "README.md").read_text().splitlines()
        if f"`{name}`" in line and line.startswith("|")
    ]
    assert ROWS[name]["title"] in line


def test_a_sources_file_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "sources.csv").write_text("server,address\na,b\n")
    assert cite(tmp_path / "mine.csv") == ""


def test_a_table_of_ones_own_has_no_source(tmp_path: Path) -> None:
    assert cite(tmp_path / "mine.csv") == ""
    assert cite(PUBLISHED / "mine.csv") == ""


def test_the_source_stands_under_the_scaling_table() -> None:
    (study,) = build_studies(load_runs([KEMPNER])[0])
    assert scaling_table(study).notes[-1] == cite(KEMPNER)


def test_the_source_stands_under_the_table_of_outcomes() -> None:
    path = PUBLISHED / "osg_20_epochs.csv"
    table = make_outcome_table(make_report("", read_study(path)))
    assert table.notes == (cite(path),)


def test_the_source_stands_under_the_stages() -> None:
    table = stage_table([], read_published_stages())
    assert table is not None
    assert table.notes[-1] == cite(PUBLISHED / "works21_stages.csv")
