"""What a scaling study runs: each size and repeat, with its batch and its command."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dataset.errors import UserError
from scripts.jobs.run_folder import data_argument, from_here
from scripts.jobs.train_run import (
    Place,
    SlurmOptions,
    TrainRun,
    count_nodes,
    make_place,
    share_fetch,
)
from train.config import TrainConfig, parse_config
from train.recipe import choose_recipe


@dataclass(frozen=True)
class StudyPlan:
    """A study as it was asked for."""

    data: str  # a URL, or a path relative to the study's folder, so that both can move together
    cluster: str
    gpus: tuple[int, ...]
    mode: str  # weak or strong
    repeats: int
    train_flags: tuple[str, ...]
    slurm: SlurmOptions = field(default_factory=SlurmOptions)
    microbatch: int | None = None  # the smallest that a row found; None: rows still search

    def __post_init__(self) -> None:
        if not self.gpus or min(self.gpus) < 1 or len(set(self.gpus)) < len(self.gpus):
            text = ",".join(map(str, self.gpus))
            raise UserError(f"--gpus {text}: give different counts above 0, such as 1,2,4")
        if self.repeats < 1:
            raise UserError(f"--repeats {self.repeats}: must be at least 1")
        if self.cluster == "slurm":
            self.slurm.check_sizes(self.gpus)

    @property
    def place(self) -> Place:
        return make_place(self.cluster, self.slurm, self.train_flags)


@dataclass(frozen=True, kw_only=True)
class StudyRun(TrainRun):
    """One run of a study: a size and its repeat."""

    repeat: int
    batch_size: int


def make_runs(plan: StudyPlan, folder: Path) -> list[StudyRun]:
    """Every run of the study; raises for flags that the trainer would refuse.

    Rows are comparable only if they share a recipe, so `auto` is asked once, for the smallest.
    """
    data = [data_argument(plan.data, folder)] if plan.data else []
    config = _parse(plan, folder)
    base = [*data, *share_fetch(plan.data or "", plan.train_flags)]
    base += _without_batch(plan.train_flags)
    pinned = ["--recipe", _first_recipe(config)] if config.recipe == "auto" else []
    batches = batch_sizes(plan.gpus, plan.mode, config.batch_size)
    if config.microbatch is None:
        pinned += microbatch_flags(batches, plan.microbatch)
    runs = []
    for num_gpus, batch_size in batches.items():
        for repeat in range(plan.repeats):
            group = f"{folder.name}-gpus{num_gpus:04d}"
            name = f"{group}-r{repeat + 1}"
            seed = ["--seed", str(config.seed + repeat)] if repeat else []
            own = ["-b", str(batch_size), *pinned, *seed, "--output", from_here(folder / name)]
            runs.append(
                StudyRun(
                    name=name,
                    group=group,
                    num_gpus=num_gpus,
                    num_nodes=count_nodes(plan.place, num_gpus),
                    argv=(*base, *own),
                    repeat=repeat + 1,
                    batch_size=batch_size,
                )
            )
    return runs


def describe_pin(plan: StudyPlan, folder: Path) -> str:
    """A sentence if `auto` would have chosen another recipe for some rows, else nothing."""
    config = _parse(plan, folder)
    pinned = _first_recipe(config)
    for run in make_runs(plan, folder):
        other = choose_recipe(config.recipe, run.batch_size)
        if other != pinned:
            return (
                f"recipe: {pinned} in all rows, so that they can be compared; auto would take "
                f"{other} from batch {run.batch_size} on"
            )
    return ""


def _parse(plan: StudyPlan, folder: Path) -> TrainConfig:
    data = [data_argument(plan.data, folder)] if plan.data else []
    return parse_config([*data, *plan.train_flags])


def _first_recipe(config: TrainConfig) -> str:
    """The recipe of the smallest run, whose batch is the one that was given."""
    return choose_recipe(config.recipe, config.batch_size)


def _without_batch(flags: tuple[str, ...]) -> list[str]:
    """The trainer's flags without -b, which each run sets for itself."""
    kept, skip = [], False
    for word in flags:
        if skip:
            skip = False
        elif word in ("-b", "--batch-size"):
            skip = True
        elif not word.startswith("--batch-size=") and not (word[:2] == "-b" and word[2:].isdigit()):
            kept.append(word)
    return kept


def batch_sizes(gpus: Sequence[int], mode: str, first_batch: int) -> dict[int, int]:
    """The global batch of each size, given that of the smallest one."""
    smallest = min(gpus)
    batches = {}
    for num_gpus in sorted(gpus):
        scale = num_gpus / smallest if mode == "weak" else 1
        batch_size = round(first_batch * scale)
        if batch_size % num_gpus or batch_size != first_batch * scale:
            raise UserError(
                f"a batch of {first_batch} cannot be split evenly over {num_gpus} GPUs ({mode} "
                f"scaling from {smallest}); give -b a multiple of {smallest * num_gpus} after --"
            )
        batches[num_gpus] = batch_size
    return batches


def microbatch_flags(batches: Mapping[int, int], agreed: int | None) -> list[str]:
    """Flags that give batch norm groups of the same size in all rows.

    `agreed` is the smallest microbatch that a row found to fit. Until there is one, each row looks
    for what fits, starting with the largest microbatch that all rows could use.
    """
    if agreed is not None:
        return ["--microbatch", str(agreed)]
    per_gpu = [batch_size // num_gpus for num_gpus, batch_size in batches.items()]
    shared = math.gcd(*per_gpu)
    return ["--largest-microbatch", str(shared)] if max(per_gpu) > shared else []
