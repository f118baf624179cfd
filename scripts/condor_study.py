#!/usr/bin/env python3
"""Writes the DAG of a grid study: check the data, one node per job, the report at the end.

With --search the jobs are the trials of a search, the training of the best and its evaluation.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dataset.packages import find_problem, require_packages

require_packages()

from dataset.errors import UserError, run_command
from dataset.flags import REQUIRED, flag, make_parser, parse_flags
from scripts.checks.study_data import check_data

ROOT = Path(__file__).resolve().parents[1]
PYTHON = shlex.quote(sys.executable)
SUBMIT_FILE = ROOT / "condor" / "train.sub"
REPORT_NEEDS = ("htcondor2", "matplotlib")  # of scripts/grid_report.py, run by the same Python
SEARCH_NEEDS = ("numpy", "optuna")  # of the scripts of its nodes
log = logging.getLogger("trainyard")

EPILOG = """example:
  python scripts/condor_study.py osdf:///nrp/osdf/ILSVRC2012/ILSVRC2012_img_train.tar \\
      --jobs 100 --out study DATA_GB=138 EPOCHS=5 PROJECT=MyProject
  cd study && condor_submit_dag study.dag

  python scripts/condor_study.py osdf:///nrp/osdf/ILSVRC2012/ILSVRC2012_img_train.tar \\
      --search 20 --space "lr=log:0.01..10, recipe=sgd|lars" --out study EPOCHS=5 DATA_GB=138

NAME=VALUE goes to condor/train.sub as on condor_submit's command line. To continue a study that
stopped, submit the same DAG again. study/report has the tables and the pictures."""

CHECK = """#!/bin/bash
# Before any job: is the data there, does it fit, is its index the right one?
exec {python} {script} --check {arguments}
"""
REPORT = """#!/bin/bash
# After all jobs, whatever became of them. $1: the DAG's status, $2: how many nodes failed.
mkdir -p results
if [[ -s study.log ]]; then
    {python} {script} study.log --runs results --out report >report.log 2>&1 || exit 1
fi
# The status of this node is that of the DAG: a failure leaves a rescue DAG that runs the rest.
[[ $1 == 0 && $2 == 0 ]]
"""
NOOP = "executable = /bin/true\nlog = dag.log\nqueue\n"


@dataclass(frozen=True, kw_only=True)
class StudyFlags:
    """The flags of scripts/condor_study.py."""

    data: str = flag(REQUIRED, "URLs of the data, separated by commas, or dummy (no data)", "DATA")
    settings: tuple[str, ...] = flag(
        REQUIRED, "settings of condor/train.sub", "NAME=VALUE", nargs="*"
    )
    jobs: int | None = flag(
        None, "training jobs (default 1); with --search: trials at once (default 4)", metavar="N"
    )
    search: int | None = flag(None, "search with so many trials, then train the best", metavar="N")
    space: str = flag("", "what to search, such as 'lr=log:0.01..10, recipe=sgd|lars'")
    metric: str = flag("acc1", "a field of epochs.jsonl; a loss is minimised; default acc1")
    prune: bool = flag(False, argparse.SUPPRESS)  # search.py has it: refused with the reason
    best_epochs: int = flag(0, "epochs of the best's training; default: as in the trials")
    out: Path | None = flag(None, "folder to write the study to", metavar="DIR")
    retries: int = flag(2, "tries after a failure (default 2)")
    check: bool = flag(False, "only check DATA, as the DAG does first")

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise UserError(f"--retries {self.retries}: must be 0 or more")
        if self.best_epochs < 0:
            raise UserError(f"--best-epochs {self.best_epochs}: must be 1 or more")
        if self.prune:
            raise UserError(
                "--prune: a trial of a DAG cannot be stopped early, because its epochs come home "
                "only with its job; leave it out, or search with scripts/search.py"
            )
        if self.search is None and (self.space or self.best_epochs):
            raise UserError("--space and --best-epochs go with --search N")
        parse_macros(self.settings)

    @property
    def macros(self) -> dict[str, str]:
        return parse_macros(self.settings)


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the study, or checks its data."""
    flags = parse_flags(StudyFlags, make_parser(__doc__, EPILOG), arguments, intermixed=True)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if flags.check:
        check_data(flags.data, flags.macros)
        return 0
    problem = find_problem(*REPORT_NEEDS)  # found now, not after a hundred jobs
    if problem:
        raise UserError(f"the report at the DAG's end could not be made: {problem}")
    if flags.out is None or (flags.jobs is not None and flags.jobs < 1):
        raise UserError("--out DIR and --jobs N (at least 1) are needed to write a study")
    if flags.search is not None:
        write_search_study(flags, flags.search, flags.out)
    else:
        write_study(flags, flags.out)
    log.info("next: cd %s && condor_submit_dag study.dag", shlex.quote(str(flags.out)))
    return 0


def parse_macros(texts: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE pairs for the submit file."""
    macros = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Z][A-Z_]*", name):
            raise UserError(f"{text!r} is not a NAME=VALUE for condor/train.sub, such as EPOCHS=5")
        if name in ("N", "SEED", "DATA", "LOG", "RESULTS", "ROOT", "TRIAL", "CHOSEN"):
            raise UserError(f"{name} is set by the study itself; leave {text!r} out")
        if name not in (known := find_settings(SUBMIT_FILE.read_text())):
            close = difflib.get_close_matches(name, sorted(known), n=1)
            guess = f"did you mean {close[0]}? " if close else ""
            raise UserError(
                f"{name} is no setting of condor/train.sub; {guess}docs/grid.md lists them"
            )
        if '"' in value or "'" in value or "\\" in value or "\n" in value:
            raise UserError(
                f"{text!r}: a submit file cannot carry quotes or backslashes; avoid them"
            )
        macros[name] = _find_file(name, value) if name in ("INDEX", "WEIGHTS") else value
    return macros


def _find_file(name: str, value: str) -> str:
    """A file that travels with the jobs, by its whole path: they are submitted elsewhere."""
    if not value or "://" in value:
        return value
    if not Path(value).is_file():
        raise UserError(f"{name}={value}: no such file")
    return str(Path(value).absolute())


def find_settings(submit: str) -> set[str]:
    """The names that a submit file reads and does not set itself."""
    lines = [line for line in submit.splitlines() if not line.startswith("#")]
    text = "\n".join(lines)
    read = re.findall(r"\$\(([A-Z][A-Z_]*)[:)]", text) + re.findall(r"defined ([A-Z_]+)", text)
    return set(read) - set(re.findall(r"(?m)^\s*([A-Z_]+) =", text))


def write_study(flags: StudyFlags, out: Path) -> None:
    """The folder of the study; a DAG that is there already is not overwritten."""
    refuse_old(out)
    report = REPORT.format(python=PYTHON, script=quote_script("grid_report"))
    dag = make_dag(flags.data, flags.jobs or 1, flags.retries, flags.macros)
    write_folder(out, {"report.sh": report, "study.dag": dag}, flags)


def write_search_study(flags: StudyFlags, num_trials: int, out: Path) -> None:
    """The same for a search; its data is asked for at once."""
    if problem := find_problem(*SEARCH_NEEDS):
        raise UserError(f"the scripts of the search could not run: {problem}")
    from scripts.trials.dag import SearchDag, find_index_to_make, make_files, plan_search
    from scripts.trials.search_file import write_search

    refuse_old(out)
    search, macros = out / "search", flags.macros
    wanted = (num_trials, flags.jobs or 4, flags.space, flags.metric)
    plan = plan_search(flags.data, *wanted, macros, search)
    url = find_index_to_make(plan, search, macros, check_data(flags.data, macros))
    is_path = flags.data != "dummy" and "://" not in flags.data
    data = str(Path(flags.data).absolute()) if is_path else flags.data
    values = common_values(data) | macros | {"SEED": "0"}
    dag = SearchDag(plan, SUBMIT_FILE, values, flags.retries, flags.best_epochs, url)
    search.mkdir(parents=True)
    write_search(search, plan)
    write_folder(out, make_files(dag, PYTHON, ROOT), flags)


def refuse_old(out: Path) -> None:
    """Raises for a folder that has a study."""
    if (dag := out / "study.dag").exists():
        raise UserError(
            f"{dag} exists; submit it again to continue, or choose another --out for a new study"
        )


def quote_script(name: str) -> str:
    return shlex.quote(str(ROOT / "scripts" / f"{name}.py"))


def write_folder(out: Path, files: Mapping[str, str], flags: StudyFlags) -> None:
    """Writes the files, and those that every study has."""
    words = [flags.data, *(f"{name}={value}" for name, value in flags.macros.items())]
    check = CHECK.format(
        python=PYTHON, script=quote_script("condor_study"), arguments=shlex.join(words)
    )
    out.mkdir(parents=True, exist_ok=True)
    for name, text in ({"check.sh": check, "noop.sub": NOOP} | dict(files)).items():
        (out / name).write_text(text)
        if name.endswith(".sh"):
            (out / name).chmod(0o755)


def common_values(data: str) -> dict[str, str]:
    """What all jobs of a study are submitted with."""
    return {"N": "1", "DATA": data, "LOG": "study.log", "RESULTS": "results", "ROOT": str(ROOT)}


def make_dag(data: str, num_jobs: int, num_retries: int, macros: Mapping[str, str]) -> str:
    """The DAG: check, then all jobs, and at the end the report, even after failures."""
    common = common_values(data)
    names = [f"job{i:0{len(str(num_jobs - 1))}d}" for i in range(num_jobs)]
    lines = [
        "# Written by scripts/condor_study.py. Submit it here: condor_submit_dag study.dag",
        "JOB check noop.sub NOOP",
        "SCRIPT DEFER 75 300 PRE check check.sh",
        "",
    ]
    for seed, name in enumerate(names):
        values = common | dict(macros) | {"SEED": str(seed)}
        pairs = " ".join(f'{key}="{value}"' for key, value in values.items())
        lines += [
            f"JOB {name} {SUBMIT_FILE}",
            f"VARS {name} PREPEND {pairs}",
            f"RETRY {name} {num_retries} UNLESS-EXIT 2",
        ]
    lines += [
        "",
        f"PARENT check CHILD {' '.join(names)}",
        "",
        "FINAL report noop.sub NOOP",
        "SCRIPT POST report report.sh $DAG_STATUS $FAILED_COUNT",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(run_command(main))
