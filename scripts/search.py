#!/usr/bin/env python3
"""Searches for good flags of the trainer: Optuna chooses them, each trial is a training."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dataset.packages import require_extra, require_packages

require_packages("numpy", "submitit", "torch")
require_extra("optuna", "pip install optuna")

from dataset.errors import DONE, UserError, run_command
from dataset.flags import REQUIRED, flag, flags_of, make_parser, parse_flags, split_words
from report.search.trials import SEARCH_FILE
from report.table import to_json, to_markdown
from report.words import count
from scripts.jobs.folder_flags import (
    FolderFlags,
    StatusFlags,
    choose_folder,
    parse_folder_flags,
)
from scripts.jobs.run_folder import relative_data
from scripts.jobs.train_run import CLUSTERS, SlurmOptions
from scripts.trials.chain import submit_chain
from scripts.trials.results import best_words
from scripts.trials.run_search import ask_search, cancel_search, run_search
from scripts.trials.search_file import (
    SearchPlan,
    check_plan,
    extend_search,
    read_search,
    write_search,
)
from scripts.trials.store import read_trials
from train.records.record import RUN_FILE

log = logging.getLogger("trainyard")
EXAMPLE = """examples:
  python scripts/search.py DATA --trials 20 --space "lr=log:0.01..10, label_smoothing=0..0.2" \\
      -- -a resnet18 -b 256 --epochs 9
  python scripts/search.py DATA --trials 20 --cluster slurm --jobs 4 --partition gpu --prune \\
      --space "lr=log:0.01..10, wd=log:1e-6..1e-3, recipe=sgd|lars" -- -b 1024 --epochs 18
  python scripts/search.py DATA --trials 20 --cluster slurm --chain --best-epochs 90 \\
      --space "lr=log:0.01..10" -- -b 1024 --epochs 18
  python scripts/search.py status DIR      its trials, the best first
  python scripts/search.py resume DIR      goes on, after Ctrl-C, a kill or a reboot
  python scripts/search.py cancel DIR      stops its trials with a checkpoint; resume continues
  python scripts/search.py best DIR        the flags that train the best, one word a line

--space: FLAG=LOW..HIGH, FLAG=log:LOW..HIGH or FLAG=A|B|C, separated by commas, where FLAG is a
flag of `python -m train`, but none that names files or changes nothing in the result, such as
--output (an unknown FLAG lists those that can be searched). Flags after -- go to every trial.
"""


@dataclass(frozen=True, kw_only=True)
class NewSearch:
    """The flags that start a search, or add trials to one."""

    data: str = flag("", "the data, as for python -m train", "DATA", nargs="?")
    trials: int = flag(20, "default 20; with the --out of a search: so many in all")
    space: str = flag(REQUIRED, "what to search, such as 'lr=log:0.01..10, recipe=sgd|lars'")
    cluster: str = flag("local", "default local: this machine", choices=CLUSTERS)
    jobs: int | None = flag(None, "trials at once; default 1 on this machine, 4 on slurm")
    metric: str = flag("acc1", "a field of epochs.jsonl; a loss is minimised; default acc1")
    prune: bool = flag(False, "stop hopeless trials early (successive halving)")
    gpus: int = flag(1, "GPUs of a trial (with --device cpu: ranks); default 1")
    seed: int = flag(0, "seed of the choices, not of the trainings; default 0")
    keep_checkpoints: bool = flag(False, "keep those of all trials, not of the best alone")
    chain: bool = flag(
        False, "slurm: submit search, training of the best, evaluation and page as jobs; return"
    )
    best_epochs: int = flag(0, "with --chain: epochs of the best's training; default: the trials'")
    out: Path | None = flag(None, "the search's folder; default run_results/searches/<time>")
    slurm: SlurmOptions = flags_of(SlurmOptions, "passed on to sbatch")

    def __post_init__(self) -> None:
        if self.best_epochs < 0:
            raise UserError(f"--best-epochs {self.best_epochs}: must be 1 or more")
        if self.chain and self.cluster != "slurm":
            raise UserError("--chain submits SLURM jobs; add --cluster slurm, or leave it out")
        if self.best_epochs and not self.chain:
            raise UserError("--best-epochs goes with --chain")

    def make_plan(self, folder: Path, train_flags: list[str]) -> SearchPlan:
        default = 4 if self.cluster == "slurm" else 1
        return SearchPlan(
            data=relative_data(self.data, folder),
            cluster=self.cluster,
            trials=self.trials,
            jobs=default if self.jobs is None else self.jobs,
            space=self.space,
            metric=self.metric,
            prune=self.prune,
            seed=self.seed,
            gpus=self.gpus,
            train_flags=tuple(train_flags),
            keep_checkpoints=self.keep_checkpoints,
            slurm=self.slurm,
        )


@dataclass(frozen=True, kw_only=True)
class BestFlags(FolderFlags):
    epochs: int = flag(0, "epochs of the training; default: as in the trial")


def main() -> int:
    """Starts a search, or shows the status of one, resumes it or cancels it."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    words = sys.argv[1:]
    command = words[0] if words else ""
    if command == "status":
        return _status(parse_folder_flags(StatusFlags, "search.py", words, EXAMPLE))
    if command == "resume":
        return _resume(parse_folder_flags(FolderFlags, "search.py", words, EXAMPLE))
    if command == "cancel":
        return _cancel(parse_folder_flags(FolderFlags, "search.py", words, EXAMPLE))
    if command == "best":
        return _best(parse_folder_flags(BestFlags, "search.py", words, EXAMPLE))
    ours, train_flags = split_words(words)
    return _start(parse_flags(NewSearch, make_parser(__doc__, EXAMPLE), ours), train_flags)


def _start(flags: NewSearch, train_flags: list[str]) -> int:
    folder = choose_folder(flags.out, "run_results/searches")
    plan = flags.make_plan(folder, train_flags)
    check_plan(plan, folder)
    if (folder / RUN_FILE).exists():
        raise UserError(f"{folder} holds a training ({RUN_FILE}); give another --out")
    if (folder / SEARCH_FILE).exists():
        has_values = any(trial.value is not None for trial in read_trials(folder).values())
        plan = extend_search(read_search(folder), plan, folder, has_values)
    folder.mkdir(parents=True, exist_ok=True)
    if not flags.chain:
        return run_search(folder, plan)
    write_search(folder, plan)
    submit_chain(folder, plan, flags.best_epochs)
    log.info("submitted; see how far it is with: search.py status %s", folder)
    return DONE


def _resume(flags: FolderFlags) -> int:
    folder = flags.folder.absolute()
    return run_search(folder, read_search(folder))


def _status(flags: StatusFlags) -> int:
    table = ask_search(flags.folder.absolute())
    print(to_json([table]) if flags.format == "json" else to_markdown(table), end="")
    return DONE


def _cancel(flags: FolderFlags) -> int:
    trials = count(cancel_search(flags.folder.absolute()), "trial")
    log.info("%s ended; continue with: search.py resume %s", trials, flags.folder)
    return DONE


def _best(flags: BestFlags) -> int:
    folder = flags.folder.absolute()
    plan = read_search(folder)
    words = best_words(plan, list(read_trials(folder).values()), folder, flags.epochs)
    if not words:
        raise UserError(f"no trial of {flags.folder} has a result; see search.py status")
    print("\n".join(words))
    return DONE


if __name__ == "__main__":
    sys.exit(run_command(main))
