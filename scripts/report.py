#!/usr/bin/env python3
"""Makes one self-contained HTML page from run folders, published tables and grid event logs."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dataset.packages import require_packages

require_packages("numpy", "matplotlib")

from dataset.durable import writing_whole
from dataset.errors import CommandError, UserError, run_command
from dataset.flags import REQUIRED, flag, make_parser, parse_flags
from report.curves import load_epochs
from report.evaluation import find_predictions, load_evaluations
from report.example_logs import refuse_bare_log
from report.grid.osg_study import is_study_table
from report.grid.replay import is_replay, read_replay
from report.grid.report import GridReport, report_logs, report_tables
from report.page import Contents, build_page
from report.runs import ReportedRun, load_runs
from report.scaling import build_studies
from report.search.trials import SEARCH_FILE, Search, find_searches, load_search
from report.stages import load_stages, read_published_stages, summarise_stages
from report.words import parse_counts
from train.records.record import RUN_FILE, STAGES_FILE

log = logging.getLogger("trainyard")
EVENT = re.compile(rb"^\d{3} \(\d+\.\d+\.\d+\) ")
EXAMPLE = """examples:
  python scripts/report.py run_results/cpu --out report.html
  python scripts/report.py my_study grid/study.log --predict 128,256 --out report.html
  python scripts/report.py run_results/published/kempner_a100.csv \\
      run_results/published/osg_100_jobs_5_epochs.csv --epochs 90 --out published.html
"""


@dataclass(frozen=True, kw_only=True)
class ReportFlags:
    """The flags of scripts/report.py."""

    inputs: tuple[Path, ...] = flag(
        REQUIRED,
        "run folders, folders of runs, predictions.csv, published CSVs, CSVs that name "
        "logs of pytorch/examples, HTCondor event logs, osg_week.json",
        "RUNS_AND_LOGS",
        nargs="+",
    )
    out: Path = flag(Path("report.html"), "default report.html")
    title: str = flag("Trainyard report", "default Trainyard report")
    epochs: int | None = flag(None, "epochs of each run in a published CSV")
    target_acc1: float | None = flag(None, "show the time to this accuracy (%%)")
    predict: tuple[int, ...] = flag((), "also predict for N GPUs", type=parse_counts, metavar="N,N")

    def __post_init__(self) -> None:
        if self.epochs is not None and self.epochs < 1:
            raise UserError(f"--epochs {self.epochs}: must be at least 1")
        if self.out.is_dir():
            example = self.out / "report.html"
            raise UserError(f"--out {self.out} is a folder; name a file, such as {example}")


@dataclass
class Inputs:
    """The arguments sorted by what they are."""

    runs: list[Path] = field(default_factory=list)
    stages: list[Path] = field(default_factory=list)
    evaluations: list[Path] = field(default_factory=list)
    grid_tables: list[Path] = field(default_factory=list)
    event_logs: list[Path] = field(default_factory=list)
    replays: list[Path] = field(default_factory=list)
    searches: list[Path] = field(default_factory=list)


def main() -> int:
    """Reads everything, writes the page."""
    flags = parse_flags(ReportFlags, make_parser(__doc__, EXAMPLE))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    inputs = sort_inputs(flags.inputs)
    page = build_page(_read(inputs, flags))
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    with writing_whole(flags.out) as file:
        file.write(page.encode())
    log.info("wrote %s (%.0f KB)", flags.out, len(page.encode()) / 1e3)
    return 0


def _read(inputs: Inputs, flags: ReportFlags) -> Contents:
    """What the page shows; what cannot be used is a note on it."""
    records, notes = load_stages(inputs.stages)
    replays = [read_replay(path) for path in inputs.replays]
    grids, grid_notes = _read_grids(inputs)
    searches, search_notes = _read_searches(inputs)
    notes += grid_notes + search_notes
    runs: list[ReportedRun] = []
    if inputs.runs:
        try:
            runs, run_notes = load_runs(inputs.runs, flags.epochs)
            notes += run_notes
        except UserError as error:
            if not (records or grids or replays or searches):
                raise
            if not searches:
                notes.append(str(error))
    epochs, epoch_notes = load_epochs(runs)
    evaluations, evaluation_notes = load_evaluations(inputs.evaluations)
    notes += evaluation_notes
    if not (runs or records or grids or replays or evaluations or searches):
        given = ", ".join(map(str, flags.inputs))
        reason = f" ({evaluation_notes[0]})" if evaluation_notes else ""
        fix = "give run folders or event logs"
        raise UserError(f"no runs, stages or grid jobs in {given}{reason}; {fix}")
    return Contents(
        title=flags.title,
        runs=runs,
        studies=build_studies(runs, flags.predict),
        epochs=epochs,
        evaluations=evaluations,
        stages=summarise_stages(records),
        published_stages=read_published_stages(),
        grids=grids,
        replays=replays,
        searches=searches,
        stage_records=records,
        notes=notes + epoch_notes,
        target_acc1=flags.target_acc1,
        made_by="Made by scripts/report.py from " + ", ".join(str(path) for path in flags.inputs),
    )


def _read_searches(inputs: Inputs) -> tuple[list[Search], list[str]]:
    """The searches, and notes on what of them cannot be read."""
    searches: list[Search] = []
    notes: list[str] = []
    for folder in find_searches(inputs.searches):
        try:
            search, more = load_search(folder)
        except CommandError as error:
            notes.append(f"left out: {error}")
            continue
        searches.append(search)
        notes += more
    return searches, notes


def _read_grids(inputs: Inputs) -> tuple[list[GridReport], list[str]]:
    """A report for each study's table and one for all event logs, and notes on unusable logs."""
    grids = [report_tables([path]) for path in inputs.grid_tables]
    if not inputs.event_logs:
        return grids, []
    folders = [path for path in inputs.runs if path.is_dir()]
    try:
        return [*grids, report_logs(inputs.event_logs, folders, tells_runs=False)], []
    except UserError as error:
        if not inputs.runs and not inputs.stages:
            raise
        return grids, [f"no grid report: {error}"]


def sort_inputs(paths: Sequence[Path]) -> Inputs:
    """Each path by what it holds; a folder may hold runs, stages and event logs at once."""
    inputs = Inputs()
    for path in paths:
        if not path.exists():
            raise UserError(f"no such file or folder: {path}; give run folders, CSVs or event logs")
        if path.is_dir():
            _sort_folder(path, inputs)
        elif find_predictions(path):
            inputs.evaluations.append(path)
        elif path.suffix == ".csv":
            (inputs.grid_tables if is_study_table(path) else inputs.runs).append(path)
        elif path.name == STAGES_FILE:
            inputs.stages.append(path)
        elif path.name == RUN_FILE:
            inputs.runs.append(path)
            inputs.stages.append(path.parent)
        elif path.suffix == ".json" and is_replay(path):
            inputs.replays.append(path)
        elif is_event_log(path):
            inputs.event_logs.append(path)
        else:
            refuse_bare_log(path)
            raise UserError(f"{path} is not a run.json, CSV or HTCondor event log; leave it out")
    return inputs


def _sort_folder(folder: Path, inputs: Inputs) -> None:
    names = {
        RUN_FILE: inputs.runs,
        STAGES_FILE: inputs.stages,
        SEARCH_FILE: inputs.searches,
    }
    for name, where in names.items():
        if next(folder.rglob(name), None) is not None:
            where.append(folder)
    if find_predictions(folder):
        inputs.evaluations.append(folder)
    inputs.event_logs += [path for path in sorted(folder.rglob("*.log")) if is_event_log(path)]


def is_event_log(path: Path) -> bool:
    """Whether a file begins as HTCondor's event logs do; many programs write *.log files."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return EVENT.match(file.read(64)) is not None


if __name__ == "__main__":
    os.environ.setdefault("MPLBACKEND", "agg")
    sys.exit(run_command(main))
