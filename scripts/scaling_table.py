#!/usr/bin/env python3
"""Prints the scaling-efficiency table of runs, or of a published CSV, and where the time went."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dataset.packages import require_packages

require_packages("numpy")

from dataset.errors import UserError, run_command
from dataset.flags import REQUIRED, flag, make_parser, parse_flags
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
  python scripts/scaling_table.py old/logs.csv  # names logs of pytorch/examples (docs/studies.md)
  python scripts/scaling_table.py my_study --predict 128,256 --format csv > table.csv
"""


@dataclass(frozen=True, kw_only=True)
class TableFlags:
    """The flags of scripts/scaling_table.py."""

    runs: tuple[Path, ...] = flag(
        REQUIRED,
        "run folders, a published CSV, or a CSV that names logs of pytorch/examples",
        "RUNS",
        nargs="+",
    )
    format: str = flag("md", "default md", choices=("md", "csv", "json"))
    predict: tuple[int, ...] = flag((), "also predict N GPUs", type=parse_counts, metavar="N,N")
    epochs: int | None = flag(None, "epochs of each run in a CSV, to show times per epoch")

    def __post_init__(self) -> None:
        if self.epochs is not None and self.epochs < 1:
            raise UserError(f"--epochs {self.epochs}: must be at least 1")


def main() -> int:
    """Reads the runs, prints their studies."""
    flags = parse_flags(TableFlags, make_parser(__doc__, EXAMPLE))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    runs, notes = load_runs(flags.runs, flags.epochs)
    for note in notes:
        log.warning("note: %s", to_writable(note))
    studies = build_studies(runs, flags.predict)
    tables = [scaling_table(study) for study in studies]
    phases = [table for study in studies if (table := phase_table(study))]
    if flags.format == "csv":
        sys.stdout.write(to_csv(tables))
    elif flags.format == "json":
        sys.stdout.write(to_json([*tables, *phases]))
    else:
        sys.stdout.write("\n".join(map(to_markdown, [*tables, *phases])))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
