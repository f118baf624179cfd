"""The nodes of a job: which ranks are on which, and which of them leads each (no torch)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from train.ranks.cpus import own_binding
from train.ranks.launch import Launch

if TYPE_CHECKING:  # it imports torch
    from train.ranks.comm import Comm


@dataclass(frozen=True)
class Nodes:
    """The ranks of each node in ascending order, as one rank sees them; one node by default."""

    ranks: tuple[tuple[int, ...], ...] = ((0,),)
    own: int = 0  # this rank's node
    rank: int = 0

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def own_ranks(self) -> tuple[int, ...]:
        return self.ranks[self.own]

    @property
    def leaders(self) -> list[int]:
        """The first rank of each node."""
        return [ranks[0] for ranks in self.ranks]

    @property
    def leader(self) -> int:
        return self.own_ranks[0]

    @property
    def is_leader(self) -> bool:
        """Whether this rank does what is done once a node."""
        return self.rank == self.leader


def find_nodes(launch: Launch, comm: Comm) -> Nodes:
    """The nodes of the job; all ranks ask together."""
    return group_ranks(comm.gather(place_of(own_binding().machine, launch)), comm.rank)


def place_of(machine: str, launch: Launch) -> tuple[str, int, int]:
    """Where a rank is; a guessed number of its node is left out: mpirun may place them by turns."""
    return machine, launch.node_rank if launch.is_node_told else 0, launch.local_rank


def group_ranks(places: Sequence[tuple[str, int, int]], rank: int) -> Nodes:
    """The nodes, from (machine, number of the node, local rank) of each rank.

    Not every launcher tells the number of the node, and several nodes of a test are one machine:
    where a local rank comes again, it is that of the next node.
    """
    seen: Counter[tuple[str, int, int]] = Counter()
    nodes: dict[tuple[str, int, int], list[int]] = {}
    for number, place in enumerate(places):
        nodes.setdefault((*place[:2], seen[place]), []).append(number)
        seen[place] += 1
    ranks = tuple(tuple(members) for members in nodes.values())
    own = next(number for number, members in enumerate(ranks) if rank in members)
    return Nodes(ranks, own, rank)
