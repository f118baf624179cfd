"""search.json: what a search was asked for; and the training that a trial of it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dataset.durable import write_json
from dataset.errors import DataError, UserError
from report.record_shape import check_field as _check
from report.search.trials import MAX_TRIALS, SCHEMA, SEARCH_FILE, Trial, read_object
from scripts.jobs.run_folder import data_argument, from_here
from scripts.jobs.train_run import (
    CLUSTERS,
    Place,
    SlurmOptions,
    TrainRun,
    count_nodes,
    make_place,
    share_fetch,
)
from scripts.trials.space import Space, check_space, parse_space, to_flags
from train.config import parse_config

CONDOR = "condor"  # the cluster of a search whose trials are nodes of a DAG
# What another start of the same search may change.
_FREE = ("trials", "jobs", "slurm", "keep_checkpoints")


@dataclass(frozen=True)
class SearchPlan:
    """A search as it was asked for."""

    data: str  # a URL, or a path relative to the search's folder, so that both can move together
    cluster: str
    trials: int
    jobs: int
    space: str
    metric: str
    prune: bool
    seed: int
    gpus: int
    train_flags: tuple[str, ...]
    keep_checkpoints: bool = False
    slurm: SlurmOptions = field(default_factory=SlurmOptions)

    def __post_init__(self) -> None:
        for name in ("trials", "jobs", "gpus"):
            value = getattr(self, name)
            if not 1 <= value <= MAX_TRIALS:
                raise UserError(f"--{name} {value}: must be from 1 to {MAX_TRIALS}")
        if self.seed < 0:
            raise UserError(f"--seed {self.seed}: must be 0 or more")
        if self.cluster == "slurm":
            self.slurm.check_sizes([self.gpus])

    @property
    def place(self) -> Place:
        return make_place(self.cluster, self.slurm, self.train_flags)


def base_flags(plan: SearchPlan, folder: Path) -> list[str]:
    """The flags that all trials share."""
    data = [data_argument(plan.data, folder)] if plan.data else []
    return [*data, *plan.train_flags]


def check_plan(plan: SearchPlan, folder: Path) -> Space:
    """The space; raises for flags that the trainer would refuse."""
    base = base_flags(plan, folder)
    config = parse_config(base)
    if config.output or config.resume or config.evaluate or config.show_recipe:
        raise UserError(
            "--output, --resume, --evaluate and --show-recipe cannot stand after --: each trial "
            "has a folder of its own, in --out"
        )
    space = parse_space(plan.space)
    check_space(space, base)
    return space


def find_epochs(plan: SearchPlan, folder: Path) -> int:
    """The epochs of a trial; if they are searched, the fewest."""
    low = getattr(parse_space(plan.space).get("epochs"), "low", None)
    return int(low) if low is not None else parse_config(base_flags(plan, folder)).epochs


def trial_run(plan: SearchPlan, trial: Trial, folder: Path) -> TrainRun:
    """The training of a trial."""
    output, own = from_here(folder / trial.name), to_flags(trial.params)
    shared = share_fetch(plan.data or "", plan.train_flags)
    return TrainRun(
        name=trial.name,
        group=f"{folder.name}-{trial.name}",
        num_gpus=plan.gpus,
        num_nodes=count_nodes(plan.place, plan.gpus),
        argv=(*base_flags(plan, folder), *shared, *own, "--output", output),
    )


def full_flags(plan: SearchPlan, trial: Trial, folder: Path) -> list[str]:
    """The flags that train a trial's model again, as it was trained in the search."""
    output = from_here(folder / "best")
    words = [*base_flags(plan, folder), *to_flags(trial.params), "--output", output]
    return [*words, "--save-model"]


def write_search(folder: Path, plan: SearchPlan) -> None:
    """Saves the plan, so that the search can be continued from another shell."""
    write_json(folder / SEARCH_FILE, {"schema": SCHEMA, "plan": asdict(plan)})


def read_search(folder: Path) -> SearchPlan:
    """The plan of a search's folder."""
    path = folder / SEARCH_FILE
    if not path.exists():
        raise UserError(f"{folder} is not a search: no {SEARCH_FILE} in it; give the --out of one")
    try:
        record = read_object(path)["plan"]
        return _plan_from(record)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UserError | DataError):
            raise
        raise UserError(f"{path} cannot be read ({error!r}); was it edited by hand?") from None


def extend_search(
    old: SearchPlan, wanted: SearchPlan, folder: Path, has_values: bool
) -> SearchPlan:
    """The search of a folder with more trials; another space or other flags are refused.

    As long as no trial has a value, another metric may be asked for.
    """
    free = (*_FREE, *(() if has_values else ("metric",)))
    same = replace(old, **{name: getattr(wanted, name) for name in free})
    if same != wanted:
        differ = [name for name, value in asdict(wanted).items() if asdict(same)[name] != value]
        raise UserError(
            f"{folder} holds another search (other {', '.join(differ)}); give another --out, or "
            f"continue it with: search.py resume {folder}"
        )
    return replace(wanted, trials=max(old.trials, wanted.trials))


def _plan_from(record: dict[str, Any]) -> SearchPlan:
    slurm, flags = record["slurm"], record["train_flags"]
    _check(isinstance(slurm, dict), "slurm", slurm)
    for name, value in slurm.items():
        _check(value is None or isinstance(value, str | int), name, value)
    for name in ("data", "space", "metric"):
        _check(isinstance(record[name], str), name, record[name])
    for name in ("trials", "jobs", "gpus", "seed"):
        _check(type(record[name]) is int, name, record[name])
    for name in ("prune", "keep_checkpoints"):
        _check(isinstance(record[name], bool), name, record[name])
    _check(record["cluster"] in (*CLUSTERS, CONDOR), "cluster", record["cluster"])
    _check(isinstance(flags, list) and _are_texts(flags), "train_flags", flags)
    return SearchPlan(**(record | {"train_flags": tuple(flags), "slurm": SlurmOptions(**slurm)}))


def _are_texts(values: Sequence[Any]) -> bool:
    return all(isinstance(value, str) for value in values)
