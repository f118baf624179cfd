#!/usr/bin/env python3
"""Makes the OSG study's tables and pictures from HTCondor event logs or from the study's tables."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dataset.packages import require_packages

require_packages()

from dataset.errors import UserError, run_command
from report.grid.input import report_logs, report_tables
from report.grid.osg_study import is_study_table
from report.grid.plots import draw_grid_charts
from report.grid.report import GridReport
from report.grid.tables import make_tables
from report.table import Table, to_csv, to_json, to_markdown
from report.words import count

log = logging.getLogger("trainyard")

EPILOG = """example:
  python scripts/grid_report.py study.log --runs results/ --out grid_report/
  python scripts/grid_report.py run_results/published/osg_100_jobs_5_epochs.csv

A folder means all *.log files below it. --format csv prints the table of jobs; --out writes every
table as CSV, report.md, report.json, and the pictures as PNG and SVG."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads, computes, prints, writes."""
    args = parse_arguments(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    paths = find_inputs(args.inputs)
    tables = [path for path in paths if is_study_table(path)]
    if tables and len(tables) != len(paths):
        raise UserError(f"{tables[0]} is a table of a study; give tables or event logs, not both")
    if tables and args.runs:
        raise UserError("--runs goes with event logs; the study's tables have no run.json")
    report = report_tables(tables) if tables else report_logs(paths, args.runs)
    print(render(report, args.format), end="")
    if args.out is not None:
        write_report(report, args.out)
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "inputs", nargs="+", type=Path, metavar="LOG_OR_CSV", help="event logs or study tables"
    )
    parser.add_argument(
        "--runs", nargs="*", type=Path, default=[], metavar="DIR",
        help="folders with the run.json and stages.jsonl that came back, to check the outcomes",
    )  # fmt: skip
    parser.add_argument("--format", choices=("md", "csv", "json"), default="md", help="default md")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for all files of the report"
    )
    return parser.parse_args(arguments)


def find_inputs(inputs: list[Path]) -> list[Path]:
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
