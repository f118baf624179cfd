"""docs/grid.md shows generated tables, and names every setting of condor/train.sub."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from report.grid.osg_study import read_study
from report.grid.report import make_report
from report.grid.tables import make_tables
from report.table import to_markdown

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs/grid.md"


@pytest.mark.parametrize("name", ["slot_time", "sites"])
def test_the_tables_are_those_of_the_command(name: str) -> None:
    report = make_report("", read_study(ROOT / "run_results/published/osg_100_jobs_5_epochs.csv"))
    (table,) = [table for table in make_tables(report) if table.name == name]
    shown = re.search(
        f"<!-- begin: {name} -->\n(.*?)<!-- end: {name} -->", DOCS.read_text(), re.DOTALL
    )
    assert shown is not None
    assert shown[1].strip() == to_markdown(table).strip()


def read_submit_file() -> str:
    """condor/train.sub without its comments."""
    lines = (ROOT / "condor/train.sub").read_text().splitlines()
    return "\n".join(line for line in lines if not line.startswith("#"))


def read_settings() -> dict[str, str]:
    """name -> default as the last table of the page has it."""
    settings: dict[str, str] = {}
    for row in re.findall(r"^\| (`[A-Z_`, ]+`) \|([^|]*)\|", DOCS.read_text(), re.MULTILINE):
        names = re.findall(r"`([A-Z_]+)`", row[0])
        defaults = [word.strip() for word in row[1].split(",")]
        settings |= dict(zip(names, defaults + [""] * len(names), strict=False))
    return settings


def test_every_setting_is_in_the_table() -> None:
    used = set(re.findall(r"\$\(([A-Z_]+):", read_submit_file()))
    used |= set(re.findall(r"defined ([A-Z_]+)", read_submit_file())) - {"ROOT"}
    assert used - set(read_settings()) == set()


def test_the_defaults_in_the_table_are_those_of_the_file() -> None:
    in_file = dict(re.findall(r"\$\(([A-Z_]+):([^)]*)\)", read_submit_file()))
    shown = {name: default for name, default in read_settings().items() if in_file.get(name)}
    assert len(shown) > 15
    assert shown == {name: in_file[name] for name in shown}
