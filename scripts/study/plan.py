"""What a scaling study runs: each size and repeat, with its batch and its command."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dataset.errors import UserError
from dataset.flags import flag
from train.config import TrainConfig, parse_config
from train.recipe import choose_recipe

CLUSTERS = ("local", "slurm")


@dataclass(frozen=True)
class SlurmOptions:
    """What is passed on to sbatch; None: the site's default."""

    partition: str | None = flag(None, None)
    account: str | None = flag(None, None)
    constraint: str | None = flag(None, None)
    qos: str | None = flag(None, None)
    time: str = flag("24:00:00", "default 24:00:00")
    # None: 4 ranks a node, with GPUs unless --device cpu
    gpus_per_node: int | None = flag(None, "default 4; none with --device cpu")
    cpus_per_task: int = flag(16, "default 16")
    mem_per_cpu: str | None = flag("4G", "default 4G")

    @property
    def ranks_per_node(self) -> int:
        return 4 if self.gpus_per_node is None else self.gpus_per_node


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
            self._check_slurm()

    def _check_slurm(self) -> None:
        per_node = self.slurm.ranks_per_node
        if per_node < 1:
            raise UserError(f"--gpus-per-node {per_node}: must be at least 1 (a rank is a GPU)")
        uneven = [n for n in self.gpus if n > per_node and n % per_node]
        if uneven:
            raise UserError(
                f"{uneven[0]} GPUs do not fill nodes of {per_node}; choose multiples of {per_node} "
                "or another --gpus-per-node"
            )


@dataclass(frozen=True)
class StudyRun:
    """One run of a study: a size and its repeat."""

    name: str
    num_gpus: int
    num_nodes: int
    repeat: int
    batch_size: int
    argv: tuple[str, ...]

    @property
    def ranks_per_node(self) -> int:
        return self.num_gpus // self.num_nodes


def make_runs(plan: StudyPlan, folder: Path) -> list[StudyRun]:
    """Every run of the study; raises for flags that the trainer would refuse.

    Rows are comparable only if they share a recipe, so `auto` is asked once, for the smallest.
    """
    data = [_data_argument(plan, folder)] if plan.data else []
    config = _parse(plan, folder)
    base = [*data, *_without_batch(plan.train_flags)]
    pinned = ["--recipe", _first_recipe(config)] if config.recipe == "auto" else []
    batches = batch_sizes(plan.gpus, plan.mode, config.batch_size)
    if config.microbatch is None:
        pinned += microbatch_flags(batches, plan.microbatch)
    runs = []
    for num_gpus, batch_size in batches.items():
        for repeat in range(plan.repeats):
            name = f"{folder.name}-gpus{num_gpus:04d}-r{repeat + 1}"
            seed = ["--seed", str(config.seed + repeat)] if repeat else []
            own = ["-b", str(batch_size), *pinned, *seed, "--output", _from_here(folder / name)]
            num_nodes = _num_nodes(plan, num_gpus)
            argv = (*base, *own)
            runs.append(StudyRun(name, num_gpus, num_nodes, repeat + 1, batch_size, argv))
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
    data = [_data_argument(plan, folder)] if plan.data else []
    return parse_config([*data, *plan.train_flags])


def _first_recipe(config: TrainConfig) -> str:
    """The recipe of the smallest run, whose batch is the one that was given."""
    return choose_recipe(config.recipe, config.batch_size)


def relative_data(data: str, folder: Path) -> str:
    """DATA as the plan keeps it: a URL unchanged, a path relative to the study's folder."""
    if not data or "://" in data:
        return data
    if not Path(data).exists():
        raise UserError(f"no such file or folder: {data}; give a data folder or a URL")
    return os.path.relpath(data, folder)


def _data_argument(plan: StudyPlan, folder: Path) -> str:
    if "://" in plan.data:
        return plan.data
    return _from_here(Path(os.path.normpath(folder / plan.data)))


def _from_here(path: Path) -> str:
    """A path relative to the current folder, so that records name nothing of this machine."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


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


def uses_gpus(plan: StudyPlan) -> bool:
    """Whether each rank gets a GPU; with --device cpu ranks are plain processes, unless the
    job's GPUs were asked for by their number."""
    if plan.cluster == "slurm" and plan.slurm.gpus_per_node is not None:
        return True
    flags = plan.train_flags
    is_cpu = any(
        word == "--device=cpu" or (word == "--device" and flags[i + 1 : i + 2] == ("cpu",))
        for i, word in enumerate(flags)
    )
    return not is_cpu


def _num_nodes(plan: StudyPlan, num_gpus: int) -> int:
    return -(-num_gpus // plan.slurm.ranks_per_node) if plan.cluster == "slurm" else 1


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
