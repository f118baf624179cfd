"""What a scaling study runs: its runs, their batches and commands, kept in study.json."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dataset.durable import write_json
from dataset.errors import UserError
from dataset.flags import flag
from report.record_shape import shorten
from scripts.study.batches import batch_sizes, microbatch_flags
from train.config import TrainConfig, parse_config
from train.recipe import choose_recipe
from train.records.record import parse_json

STUDY_FILE = "study.json"
SCHEMA = 1
CLUSTERS = ("local", "slurm")
MAX_COUNT = 10**5  # of GPUs or repeats


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


@dataclass(frozen=True)
class StudyFile:
    """study.json: the plan, and the jobs that were submitted for each run, oldest first."""

    plan: StudyPlan
    jobs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def with_job(self, name: str, job_id: str) -> StudyFile:
        """The same with one more job of a run."""
        return replace(self, jobs={**self.jobs, name: (*self.jobs.get(name, ()), job_id)})

    def last_job(self, name: str) -> str | None:
        return self.jobs[name][-1] if self.jobs.get(name) else None


def write_study(folder: Path, study: StudyFile) -> None:
    """Saves the study, so that it can be continued from another shell or after a reboot."""
    record = {"schema": SCHEMA, "plan": asdict(study.plan), "jobs": dict(study.jobs)}
    write_json(folder / STUDY_FILE, record)


def read_study(folder: Path) -> StudyFile:
    """The study of a folder."""
    path = folder / STUDY_FILE
    if not path.exists():
        raise UserError(
            f"{folder} is not a study: no {STUDY_FILE} in it; give the --out of a study"
        )
    try:
        record = parse_json(path.read_bytes())
        if record["schema"] > SCHEMA:
            raise UserError(f"{path} has schema {record['schema']}; update this code to read it")
        return StudyFile(_plan_from(record["plan"]), _jobs_from(record["jobs"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} cannot be read ({error!r}); was it edited by hand?") from None


def extend_study(old: StudyFile, wanted: StudyPlan, folder: Path) -> StudyFile:
    """The study of a folder with the runs of the new plan; another recipe is refused.

    More sizes or repeats, or other options of SLURM, continue a study; a run that exists
    must keep its command, because its run would be resumed.
    """
    gpus = tuple(sorted({*old.plan.gpus, *wanted.gpus}))
    repeats = max(old.plan.repeats, wanted.repeats)
    merged = replace(wanted, gpus=gpus, repeats=repeats, microbatch=old.plan.microbatch)
    before = {run.name: run.argv for run in make_runs(old.plan, folder)}
    after = {run.name: run.argv for run in make_runs(merged, folder)}
    changed = [name for name, argv in before.items() if after.get(name) != argv]
    if changed or old.plan.cluster != wanted.cluster:
        raise UserError(
            f"{folder} holds another study (its flags: {_describe(old.plan)}); give another --out, "
            f"or continue it with: scaling_study.py resume {folder}"
        )
    return replace(old, plan=merged)


def _plan_from(record: dict[str, Any]) -> StudyPlan:
    """The plan of study.json; ValueError for a field of the wrong type, KeyError without one."""
    slurm = record["slurm"]
    _check(isinstance(slurm, dict), "slurm", slurm)
    for name, value in slurm.items():
        _check(value is None or isinstance(value, str | int), name, value)
    for name in ("data", "cluster", "mode"):
        _check(isinstance(record[name], str), name, record[name])
    _check(record["cluster"] in CLUSTERS, "cluster", record["cluster"])
    gpus, flags, repeats = record["gpus"], record["train_flags"], record["repeats"]
    _check(isinstance(gpus, list) and all(map(_is_count, gpus)), "gpus", gpus)
    _check(isinstance(flags, list) and all(isinstance(f, str) for f in flags), "flags", flags)
    _check(_is_count(repeats), "repeats", repeats)
    microbatch = record.get("microbatch")  # not in a study of an earlier version
    _check(microbatch is None or _is_count(microbatch), "microbatch", microbatch)
    return StudyPlan(
        data=record["data"],
        cluster=record["cluster"],
        gpus=tuple(gpus),
        mode=record["mode"],
        repeats=repeats,
        train_flags=tuple(flags),
        slurm=SlurmOptions(**slurm),
        microbatch=microbatch,
    )


def _jobs_from(record: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    for name, ids in record.items():
        _check(isinstance(ids, list) and all(isinstance(i, str) for i in ids), name, ids)
    return {name: tuple(ids) for name, ids in record.items()}


def _is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_COUNT


def _check(is_right: bool, name: str, value: Any) -> None:
    if not is_right:
        raise ValueError(f"{name} is {shorten(value)}")


def _describe(plan: StudyPlan) -> str:
    gpus = ",".join(map(str, plan.gpus))
    flags = " ".join(plan.train_flags)
    return f"{plan.data} --gpus {gpus} --cluster {plan.cluster} --{plan.mode} -- {flags}"
