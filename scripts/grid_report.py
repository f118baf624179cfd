#!/usr/bin/env python3
"""Makes the OSG study's tables and pictures from HTCondor event logs or from the study's tables."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dataset.packages import require_packages

require_packages()

from dataset.errors import UserError, run_command
from dataset.flags import REQUIRED, flag, make_parser, parse_flags
from report.grid.osg_study import is_study_table
from report.grid.plots import draw_grid_charts
from report.grid.report import GridReport, report_logs, report_tables
from report.grid.tables import make_tables
from report.table import Table, to_csv, to_json, to_markdown
from report.words import count

log = logging.getLogger("trainyard")

EPILOG = """example:
  python scripts/grid_report.py study.log --runs results/ --out grid_report/
  python scripts/grid_report.py run_results/published/osg_100_jobs_5_epochs.csv

A folder means all *.log files below it. --format csv prints the table of jobs; --out writes every
table as CSV, report.md, report.json, and the pictures as PNG and SVG."""


@dataclass(frozen=True, kw_only=True)
class GridReportFlags:
    """The flags of scripts/grid_report.py."""

    inputs: tuple[Path, ...] = flag(REQUIRED, "event logs or study tables", "LOG_OR_CSV", nargs="+")
    runs: tuple[Path, ...] = flag(
        (),
        "folders with the run.json and stages.jsonl that came back, to check the outcomes",
        nargs="*",
        metavar="DIR",
    )
    format: str = flag("md", "default md", choices=("md", "csv", "json"))
    out: Path | None = flag(None, "folder for all files of the report", metavar="DIR")


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads, computes, prints, writes."""
    flags = parse_flags(GridReportFlags, make_parser(__doc__, EPILOG), arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    paths = find_inputs(flags.inputs)
    tables = [path for path in paths if is_study_table(path)]
    if tables and len(tables) != len(paths):
        raise UserError(f"{tables[0]} is a table of a study; give tables or event logs, not both")
    if tables and flags.runs:
        raise UserError("--runs goes with event logs; the study's tables have no run.json")
    report = report_tables(tables) if tables else report_logs(paths, flags.runs)
    print(render(report, flags.format), end="")
    if flags.out is not None:
        write_report(report, flags.out)
    return 0


def find_inputs(inputs: Sequence[Path]) -> list[Path]:
    """The files to read; a folder stands for the event logs below it."""
    files: list[Path] = []
    for path in inputs:
        found = sorted(path.rglob("*.log")) if path.is_dir() else [path]
        if not found:
            raise UserError(f"no *.log file below {path}; give the event logs themselves")
        files += found
    return list(dict.fromkeys(files))


def render(report: GridReport, form: str) -> str:
    """The report as text."""
    tables = make_tables(report)
    if form == "csv":
        return to_csv([table for table in tables if table.name == "jobs"])
    if form == "json":
        return to_json(tables)
    return "\n".join([f"# {report.title}\n", *map(to_markdown, tables)])


def write_report(report: GridReport, folder: Path) -> None:
    """report.md, report.json, a CSV a table, and the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text(render(report, "md"))
    (folder / "report.json").write_text(render(report, "json"))
    tables: list[Table] = make_tables(report)
    for table in tables:
        (folder / f"{table.name}.csv").write_text(to_csv([table]))
    charts = {path.stem for path in draw_grid_charts(report, folder)}
    pictures = f"{count(len(charts), 'picture')} (each as PNG and SVG)" if charts else "no picture"
    log.info("wrote %s and %s to %s", count(len(tables), "table"), pictures, folder)


if __name__ == "__main__":
    sys.exit(run_command(main))
