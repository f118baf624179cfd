#!/usr/bin/env python3
"""Runs a scaling study: the same training on 1, 2, 4, ... GPUs, here or through SLURM."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dataset.packages import require_packages

require_packages("numpy", "submitit", "torch")

from dataset.errors import DONE, run_command
from dataset.flags import REQUIRED, flag, flags_of, make_parser, parse_flags, split_words
from report.table import to_json, to_markdown
from report.words import count, parse_counts
from scripts.jobs.folder_flags import (
    FolderFlags,
    StatusFlags,
    choose_folder,
    parse_folder_flags,
)
from scripts.jobs.run_folder import relative_data
from scripts.jobs.submit import describe
from scripts.jobs.train_run import CLUSTERS, SlurmOptions
from scripts.study.plan import StudyPlan, describe_pin, make_runs
from scripts.study.run_study import ask_study, cancel_study, run_study
from scripts.study.study_file import STUDY_FILE, StudyFile, extend_study, read_study

log = logging.getLogger("trainyard")
EXAMPLE = """examples:
  python scripts/scaling_study.py DATA --gpus 1,2 --cluster local -- -a resnet18 -b 32 --epochs 3
  python scripts/scaling_study.py DATA --gpus 1,2,4,8 --cluster slurm --partition gpu -- -b 256
  python scripts/scaling_study.py status DIR      the state of each run
  python scripts/scaling_study.py resume DIR      runs what is missing, after Ctrl-C or a reboot
  python scripts/scaling_study.py cancel DIR      stops its jobs with a checkpoint; resume continues

Flags after -- go to `python -m train`; -b is the batch of the smallest size (--weak) or of every
size (--strong).
"""


@dataclass(frozen=True, kw_only=True)
class NewStudy:
    """The flags that start a study, or add to one."""

    data: str = flag("", "the data, as for python -m train", "DATA", nargs="?")
    gpus: tuple[int, ...] = flag(
        REQUIRED, "such as 1,2,4 (with --device cpu: ranks)", type=parse_counts
    )
    cluster: str = flag("local", "default local: this machine", choices=CLUSTERS)
    weak: bool = flag(False, "the batch grows with the GPUs (default)", one_of="mode")
    strong: bool = flag(False, "the global batch stays the same", one_of="mode")
    repeats: int = flag(1, "runs per size, each with its own seed; default 1")
    out: Path | None = flag(None, "the study's folder; default run_results/studies/<time>")
    dry_run: bool = flag(False, "print every command and the sbatch text, and submit nothing")
    no_wait: bool = flag(False, "return when the jobs are submitted (slurm)")
    slurm: SlurmOptions = flags_of(SlurmOptions, "passed on to sbatch")

    def make_plan(self, folder: Path, train_flags: list[str]) -> StudyPlan:
        return StudyPlan(
            data=relative_data(self.data, folder),
            cluster=self.cluster,
            gpus=self.gpus,
            mode="strong" if self.strong else "weak",
            repeats=self.repeats,
            train_flags=tuple(train_flags),
            slurm=self.slurm,
        )


@dataclass(frozen=True, kw_only=True)
class ResumeFlags(FolderFlags):
    no_wait: bool = flag(False, "return after submitting")


def main() -> int:
    """Starts a study, or shows the status of one, resumes it or cancels it."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    words = sys.argv[1:]
    command = words[0] if words else ""
    if command == "status":
        return _status(parse_folder_flags(StatusFlags, "scaling_study.py", words, EXAMPLE))
    if command == "resume":
        return _resume(parse_folder_flags(ResumeFlags, "scaling_study.py", words, EXAMPLE))
    if command == "cancel":
        return _cancel(parse_folder_flags(FolderFlags, "scaling_study.py", words, EXAMPLE))
    ours, train_flags = split_words(words)
    return _start(parse_flags(NewStudy, make_parser(__doc__, EXAMPLE), ours), train_flags)


def _start(flags: NewStudy, train_flags: list[str]) -> int:
    folder = choose_folder(flags.out, "run_results/studies")
    plan = flags.make_plan(folder, train_flags)
    runs = make_runs(plan, folder)
    if flags.dry_run:
        for _, same_size in groupby(runs, key=lambda run: run.num_gpus):
            print(describe(plan.place, list(same_size), folder))
        if pin := describe_pin(plan, folder):
            log.info("%s", pin)
        return DONE
    study = StudyFile(plan)
    if (folder / STUDY_FILE).exists():
        study = extend_study(read_study(folder), plan, folder)
    folder.mkdir(parents=True, exist_ok=True)
    return run_study(study, folder, wait=not flags.no_wait)


def _status(flags: StatusFlags) -> int:
    table, failures = ask_study(flags.folder.absolute())
    if flags.format == "json":
        print(to_json([table]), end="")
    else:
        print(to_markdown(table), *failures, sep="\n")
    return DONE


def _cancel(flags: FolderFlags) -> int:
    num_jobs = cancel_study(flags.folder.absolute())
    jobs = count(num_jobs, "job")
    log.info("%s ended; continue with: scaling_study.py resume %s", jobs, flags.folder)
    return DONE


def _resume(flags: ResumeFlags) -> int:
    folder = flags.folder.absolute()
    return run_study(read_study(folder), folder, wait=not flags.no_wait)


if __name__ == "__main__":
    sys.exit(run_command(main))
