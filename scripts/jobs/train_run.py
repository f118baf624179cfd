"""One training as a job: its name and command, its size, and the place that runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dataset.errors import UserError
from dataset.flags import flag

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

    def check_sizes(self, gpus: Sequence[int]) -> None:
        """Raises for trainings of so many GPUs that do not fill their nodes."""
        per_node = self.ranks_per_node
        if per_node < 1:
            raise UserError(f"--gpus-per-node {per_node}: must be at least 1 (a rank is a GPU)")
        uneven = [n for n in gpus if n > per_node and n % per_node]
        if uneven:
            raise UserError(
                f"{uneven[0]} GPUs do not fill nodes of {per_node}; choose multiples of {per_node} "
                "or another --gpus-per-node"
            )


@dataclass(frozen=True)
class Place:
    """Where trainings run, and whether each rank gets a GPU there."""

    cluster: str
    uses_gpus: bool
    slurm: SlurmOptions = field(default_factory=SlurmOptions)


@dataclass(frozen=True, kw_only=True)
class TrainRun:
    """One training: `argv` goes to `python -m train`."""

    name: str
    group: str  # the name of its job and of its logs' folder; repeats share one
    num_gpus: int
    num_nodes: int
    argv: tuple[str, ...]

    @property
    def ranks_per_node(self) -> int:
        return self.num_gpus // self.num_nodes


def make_place(cluster: str, slurm: SlurmOptions, train_flags: Sequence[str]) -> Place:
    """The place of trainings; with --device cpu ranks are plain processes, unless the job's GPUs
    were asked for by their number."""
    if cluster == "slurm" and slurm.gpus_per_node is not None:
        return Place(cluster, True, slurm)
    is_cpu = any(
        word == "--device=cpu"
        or (word == "--device" and list(train_flags[i + 1 : i + 2]) == ["cpu"])
        for i, word in enumerate(train_flags)
    )
    return Place(cluster, not is_cpu, slurm)


def share_fetch(data: str, train_flags: Sequence[str]) -> list[str]:
    """Flags with which trainings side by side fetch a URL once: a stream has its folder alone."""
    is_chosen = any(word.partition("=")[0] == "--stream" for word in train_flags)
    return ["--stream", "never"] if "://" in data and not is_chosen else []


def count_nodes(place: Place, num_gpus: int) -> int:
    """How many nodes the ranks of a training fill."""
    return -(-num_gpus // place.slurm.ranks_per_node) if place.cluster == "slurm" else 1
