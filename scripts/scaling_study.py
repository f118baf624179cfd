#!/usr/bin/env python3
"""Runs a scaling study: the same training on 1, 2, 4, ... GPUs, here or through SLURM."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dataset.packages import require_packages

require_packages("numpy", "submitit", "torch")

from dataset.errors import DONE, run_command
from report.table import to_json, to_markdown
from report.words import count, parse_counts
from scripts.study.jobs import describe
from scripts.study.plan import (
    CLUSTERS,
    STUDY_FILE,
    SlurmOptions,
    StudyFile,
    StudyPlan,
    describe_pin,
    extend_study,
    make_runs,
    read_study,
    relative_data,
)
from scripts.study.run_study import ask_study, cancel_study, run_study

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


def main() -> int:
    """Starts a study, or shows the status of one, resumes it or cancels it."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    words = sys.argv[1:]
    if words and words[0] in ("status", "resume", "cancel"):
        args = _folder_parser(words[0]).parse_args(words[1:])
        return {"status": _status, "resume": _resume, "cancel": _cancel}[words[0]](args)
    ours, flags = _split(words)
    return _start(_parser().parse_args(ours), flags)


def _start(args: argparse.Namespace, flags: list[str]) -> int:
    folder = (args.out or Path("run_results/studies") / time.strftime("%Y%m%d-%H%M%S")).absolute()
    plan = StudyPlan(
        data=relative_data(args.data, folder),
        cluster=args.cluster,
        gpus=args.gpus,
        mode="strong" if args.strong else "weak",
        repeats=args.repeats,
        train_flags=tuple(flags),
        slurm=SlurmOptions(
            partition=args.partition,
            account=args.account,
            constraint=args.constraint,
            qos=args.qos,
            time=args.time,
            gpus_per_node=args.gpus_per_node,
            cpus_per_task=args.cpus_per_task,
            mem_per_cpu=args.mem_per_cpu,
        ),
    )
    runs = make_runs(plan, folder)
    if args.dry_run:
        for _, same_size in groupby(runs, key=lambda run: run.num_gpus):
            print(describe(plan, list(same_size), folder))
        if pin := describe_pin(plan, folder):
            log.info("%s", pin)
        return DONE
    study = StudyFile(plan)
    if (folder / STUDY_FILE).exists():
        study = extend_study(read_study(folder), plan, folder)
    folder.mkdir(parents=True, exist_ok=True)
    return run_study(study, folder, wait=not args.no_wait)


def _status(args: argparse.Namespace) -> int:
    table, failures = ask_study(args.folder.absolute())
    if args.format == "json":
        print(to_json([table]), end="")
    else:
        print(to_markdown(table), *failures, sep="\n")
    return DONE


def _cancel(args: argparse.Namespace) -> int:
    num_jobs = cancel_study(args.folder.absolute())
    jobs = count(num_jobs, "job")
    log.info("%s ended; continue with: scaling_study.py resume %s", jobs, args.folder)
    return DONE


def _resume(args: argparse.Namespace) -> int:
    folder = args.folder.absolute()
    return run_study(read_study(folder), folder, wait=not args.no_wait)


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """The words before -- (ours), and those after it (the trainer's)."""
    if "--" not in words:
        return words, []
    cut = words.index("--")
    return words[:cut], words[cut + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("data", nargs="?", default="", metavar="DATA", help="the data, as for python -m train")
    add("--gpus", type=parse_counts, required=True, help="such as 1,2,4 (with --device cpu: ranks)")
    add("--cluster", choices=CLUSTERS, default="local", help="default local: this machine")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--weak", action="store_true", help="the batch grows with the GPUs (default)")
    way.add_argument("--strong", action="store_true", help="the global batch stays the same")
    add("--repeats", type=int, default=1, help="runs per size, each with its own seed; default 1")
    add("--out", type=Path, help="the study's folder; default run_results/studies/<time>")
    add(
        "--dry-run",
        action="store_true",
        help="print every command and the sbatch text, and submit nothing",
    )
    add("--no-wait", action="store_true", help="return when the jobs are submitted (slurm)")
    group = parser.add_argument_group("passed on to sbatch")
    default = SlurmOptions()
    for name in ("partition", "account", "constraint", "qos"):
        group.add_argument(f"--{name}")
    group.add_argument("--time", default=default.time, help=f"default {default.time}")
    group.add_argument("--gpus-per-node", type=int, help="default 4; none with --device cpu")
    group.add_argument(
        "--cpus-per-task", type=int, default=default.cpus_per_task, help="default 16"
    )
    group.add_argument("--mem-per-cpu", default=default.mem_per_cpu, help="default 4G")
    return parser


def _folder_parser(command: str) -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        f"scaling_study.py {command}", epilog=EXAMPLE, formatter_class=raw
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="the study's folder")
    if command == "status":
        parser.add_argument("--format", choices=("md", "json"), default="md")
    if command == "resume":
        parser.add_argument("--no-wait", action="store_true", help="return after submitting")
    return parser


if __name__ == "__main__":
    sys.exit(run_command(main))
