#!/usr/bin/env python3
"""Prints the scaling-efficiency table of runs, or of a published CSV, and where the time went."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dataset.packages import require_packages

require_packages("numpy")

from dataset.errors import run_command
from report.phases import phase_table
from report.runs import load_runs
from report.scaling import build_studies
from report.scaling_tables import scaling_table
from report.table import to_csv, to_json, to_markdown, to_writable
from report.words import parse_counts

log = logging.getLogger("trainyard")
EXAMPLE = """examples:
  python scripts/scaling_table.py run_results/cpu
  python scripts/scaling_table.py run_results/published/kempner_a100.csv --epochs 90
  python scripts/scaling_table.py my_study --predict 128,256 --format csv > table.csv
"""


def main() -> int:
    """Reads the runs, prints their studies."""
    args = _parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    runs, notes = load_runs(args.runs, args.epochs)
    for note in notes:
        log.warning("note: %s", to_writable(note))
    studies = build_studies(runs, args.predict)
    tables = [scaling_table(study) for study in studies]
    phases = [table for study in studies if (table := phase_table(study))]
    if args.format == "csv":
        sys.stdout.write(to_csv(tables))
    elif args.format == "json":
        sys.stdout.write(to_json([*tables, *phases]))
    else:
        sys.stdout.write("\n".join(map(to_markdown, [*tables, *phases])))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUNS", help="run folders, or a published CSV"
    )
    parser.add_argument("--format", choices=("md", "csv", "json"), default="md", help="default md")
    parser.add_argument(
        "--predict",
        type=parse_counts,
        default=(),
        metavar="N,N",
        help="also predict N GPUs",
    )
    parser.add_argument(
        "--epochs", type=int, help="epochs of each run in a CSV, to show times per epoch"
    )
    return parser


if __name__ == "__main__":
    sys.exit(run_command(main))
