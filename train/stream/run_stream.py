"""A run whose tar is still arriving: planned, opened, fetched by need, proven, and recorded.

The first rank of a node plans the stream and keeps its fetcher, a process of its own. All ranks
read the partial file, and see in a map what is here (train/data/stream_source.py). Maps, plan and
task lie in a temporary folder of the node. Of several nodes each has files of its own units, as it
has with --cache-limit (train/stream/nodes.py).
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dataset.errors import UserError
from dataset.redaction import printable, redact
from dataset.stream.arrivals import ArrivalMap, State
from dataset.stream.node import NodeStream
from dataset.stream.plan import Refusal, StreamPlan
from dataset.stream.spec import NEVER, Needs, StreamSpec
from train.config import TrainConfig
from train.data.bounded_cache import BoundedCache, open_cache, open_units
from train.data.needs import count_ahead, find_needs
from train.data.network_meter import NetworkMeter
from train.data.sample_order import SampleOrder
from train.data.sources import Source
from train.data.splits import Dataset, find_val_beside, join_splits, open_tar
from train.data.stream_source import StreamSource
from train.data.unit_needs import RunSteps
from train.data.unit_source import UnitSource
from train.ranks.comm import Comm
from train.ranks.interrupt import Vote
from train.ranks.launch import Launch
from train.ranks.nodes import Nodes
from train.ranks.watch import READING
from train.stream.early import EarlyStream
from train.stream.nodes import (
    add_costs,
    agree_on_plan,
    await_verification,
    check_same_index,
    count_costs,
    describe_shares,
    detect_shared_folder,
    find_slots,
    have_all,
    prove_classes,
    share_proofs,
)
from train.stream.task import Task, ask_for_plan, fetch_folder, wants_stream

log = logging.getLogger("trainyard")


class Stream:
    """The stream of a run on one rank; of a run that does not stream, nothing."""

    def __init__(
        self, cfg: TrainConfig, launch: Launch, comm: Comm, early: EarlyStream | None = None
    ) -> None:
        self._cfg, self._launch, self._comm = cfg, launch, comm
        self._early = early or EarlyStream()
        self._node: NodeStream | None = None
        self._sources: list[StreamSource] = []  # training, then validation if that streams too
        self._nodes = Nodes()
        self._meters: list[NetworkMeter] = []  # of all ranks of the node
        self._has_started = False  # on the leader of a node
        self._costs: list[dict[str, Any]] = []  # of the other nodes, when all last met
        self._needs: Needs = np.zeros(0, np.int32)
        self._first_step = 0
        self._cache: BoundedCache | None = None  # the leader's, where units come as files

    @property
    def is_on(self) -> bool:
        return self._node is not None

    @property
    def num_lanes(self) -> int:
        """The lanes of a fresh run; 0 if this one does not stream."""
        return len(self._nodes) if self.is_on else 0

    # Before the first step: all ranks together

    def plan(self, nodes: Nodes) -> bool:
        """Whether DATA is streamed; says why it is not, unless it is here already."""
        cfg, self._nodes = self._cfg, nodes
        if not wants_stream(cfg):
            return False
        found: StreamPlan | Refusal | None = None
        if cfg.val_share:
            found = Refusal("--val-share validates on images of the training tar itself")
        elif len(nodes) > 1 and have_all(cfg, nodes, self._comm):
            return False  # also in a folder that several nodes see
        elif len(nodes) > 1 and detect_shared_folder(self._data_dir, nodes, self._comm):
            found = Refusal(f"{self._data_dir} is one folder for several of {len(nodes)} nodes")
        elif nodes.is_leader:
            is_bounded = bool(cfg.cache_bytes) or len(nodes) > 1
            found = self._early.plan or ask_for_plan(cfg, is_bounded=is_bounded)
        self._comm.say_done("plan")
        self._comm.wait_until_done("plan", self._comm.world_size)  # for as long as it takes
        found = agree_on_plan(self._comm.gather(found), nodes)
        if isinstance(found, Refusal):
            self._refuse(found)
        elif isinstance(found, StreamPlan) and not found.train.is_here:
            create = partial(NodeStream.create, found)
            node = self._early.node or create() if nodes.is_leader else None
            others = self._comm.gather(node)
            self._node = node or others[nodes.leader]  # the leader's own keeps the folder
        return self.is_on

    @property
    def _data_dir(self) -> Path:
        return fetch_folder(self._cfg)

    def _refuse(self, refusal: Refusal) -> None:
        wish = "--cache-limit" if self._cfg.cache_bytes else "--stream always"
        if self._cfg.cache_bytes or self._cfg.stream == "always":
            raise UserError(f"{wish}: it cannot be streamed, {refusal}")
        log.info("not streamed but fetched whole first: %s", refusal)

    @property
    def whole_val(self) -> str:
        """The URL of validation if it has to be fetched whole first, as it has no index."""
        return self._node.whole_val if self._node is not None else ""

    def open_dataset(self) -> Dataset:
        """The data set, by its indexes; the images of a streamed tar come later."""
        assert self._node is not None
        meter = NetworkMeter(self._node.folder / "meter-0")
        return open_streamed(self._node, meter, self._cfg.index_dir)

    def join(self, dataset: Dataset) -> None:
        """Takes the data set as another rank may have opened it; counts on this rank's meter."""
        assert self._node is not None
        rank, world_size = self._launch.local_rank, self._comm.world_size
        num_own = len(self._nodes.own_ranks)
        self._meters = [NetworkMeter(self._node.folder / f"meter-{n}") for n in range(num_own)]
        # Sooner than the other ranks would take this one for hanging.
        max_wait_s = 0.8 * 60 * self._cfg.timeout_minutes if world_size > 1 else math.inf
        splits = (dataset.train, dataset.val)
        self._sources = [source for source in splits if isinstance(source, StreamSource)]
        for source in self._sources:
            source.count_on(self._meters[rank], rank, max_wait_s)
        if len(self._nodes) > 1:
            check_same_index(self._sources[0], self._comm)

    def start(self, order: SampleOrder, state: Mapping[str, Any] | None) -> None:
        """Each leader writes down what its node needs when, and starts the fetcher."""
        assert self._node is not None
        self._first_step = state["step"] if state is not None else 0
        val_first = state is not None and not state["is_evaluated"]
        task = Task(self._cfg, order, len(self._sources[0]), self._first_step, val_first)
        if not task.total_steps:  # a batch of more than all is refused soon
            return
        if self._nodes.is_leader:
            self._start_fetcher(task)
        if len(self._nodes) > 1:
            used = self._comm.gather(self._cache.share.used if self._cache else 0)
            of_nodes = [used[rank] for rank in self._nodes.leaders]
            log.info("%s", describe_shares(of_nodes, self._sources[0].index.tar_size, order))
        self.meet()

    def _start_fetcher(self, task: Task) -> None:
        cfg, train, node = self._cfg, self._sources[0], self._node
        assert node is not None
        place = (cfg.seed, cfg.batch_size, task.step)
        if isinstance(train, UnitSource):
            slots = find_slots(self._nodes, cfg.batch_size, self._comm.world_size)
            steps = RunSteps(task.order, *place, task.total_steps, slots)
            self._cache = open_cache(cfg.cache_bytes, train, node.plan.val, steps, node.folder)
            spec = self._cache.make_spec(len(self._nodes.own_ranks))
            self._follow(task.make_spec(node, None, spec))
        elif self._early.follows(task):
            self._needs = self._early.needs
        else:
            self._needs = find_needs(train, task.order, *place, task.total_steps - 1)
            self._follow(task.make_spec(node, self._needs))
        self._has_started = True
        tell_start(cfg.data, self._data_dir, node, task.order)

    def _follow(self, spec: StreamSpec) -> None:
        assert self._node is not None
        self._node.start(spec, [source.arrivals for source in self._sources])

    # While it trains

    def note_step(self, step: int) -> None:
        """Tells the fetcher where this rank is."""
        for source in self._sources[:1]:
            source.arrivals.note_step(self._launch.local_rank, step - self._first_step)
        if self._cache is not None:
            self._cache.note_step(step)

    def describe_ahead(self, step: int) -> str:
        """For the progress line: for how many steps all is here."""
        if not self._has_started or self._sources[0].arrivals.state is State.WHOLE:
            return ""
        if self._cache is not None:
            return self._cache.describe_ahead(step)
        ahead = count_ahead(self._needs, self._sources[0].arrivals)
        if ahead == NEVER:
            return ", all steps here"
        return f", {max(0, ahead + self._first_step - step)} steps ahead"

    def waited_s(self) -> float:
        """How long reads of this rank have waited for the network."""
        return self._meters[self._launch.local_rank].waited_s if self._meters else 0.0

    def look_at_classes(self) -> None:
        """Looks at the class tars that have come, once a node; raises if one is wrong."""
        if self._nodes.is_leader:
            for source in self._sources:
                source.list_unproven()

    def meet(self) -> None:
        """Rank 0 learns what the stream has cost the other nodes; all ranks together."""
        if self.is_on and len(self._nodes) > 1:
            costs = self._comm.gather(self._count_costs())
            self._costs = [costs[rank] for rank in self._nodes.leaders[1:] if costs[rank]]

    def describe(self) -> dict[str, Any]:
        """For the record of this attempt; of a run that does not stream, nothing."""
        costs = self._count_costs()
        if len(self._nodes) > 1 and costs:
            costs = add_costs([costs, *self._costs])
        return {"stream": costs} if costs else {}

    def _count_costs(self) -> dict[str, Any]:
        """What the stream has cost this node, as its leader knows."""
        if self._node is None or not self._has_started:
            return {}
        costs = count_costs(self._node, self._sources, self._meters)
        return costs | (self._cache.describe() if self._cache else {})

    # At the end

    def finish(self, ask: Callable[[], Vote]) -> Vote:
        """All is trained: proves the last classes, and lets a verification end; asks for a stop."""
        if not self.is_on:
            return Vote.GO_ON
        vote = Vote.GO_ON
        self._comm.advance(READING)  # however long the network takes, nobody hangs
        if len(self._nodes) > 1:
            share_proofs(self._sources[0], self._nodes, self._comm)
        if self._nodes.is_leader:
            vote = prove_classes(self._sources, ask)
            vote = vote if vote.is_urgent else await_verification(self._sources, ask)
        self._comm.say_done("stream")
        self._comm.wait_until_done("stream", self._comm.world_size)
        return Vote(max(self._comm.gather(vote)))

    def close(self) -> None:
        """Ends the fetcher and removes the folder of the node; what has arrived stays."""
        self._early.close()
        if self._node is not None and self._nodes.is_leader:
            self._node.stop()
            self._node.remove()


def refuse_nodes(num_nodes: int) -> Refusal:
    """Why a loop that is not ours does not stream on several nodes."""
    return Refusal(f"on {num_nodes} nodes, where each would fetch nearly all of it")


def open_streamed(node: NodeStream, meter: NetworkMeter, index_dir: Path | None) -> Dataset:
    """The data set of a stream; validation that is not streamed is opened in its place."""
    sources: list[Source] = [_open_source(node, name, meter) for name in node.objects]
    val = node.plan.val
    beside = val.path if val is not None else find_val_beside(node.plan.train.path)
    if beside is not None and "val" not in node.objects:
        sources.append(open_tar(beside, index_dir))
    return join_splits("tar", node.plan.train.path, *sources)


def _open_source(node: NodeStream, name: str, meter: NetworkMeter) -> StreamSource:
    index, place = node.objects[name].load_index(), node.map_path(name)
    if node.is_bounded(name):
        return open_units(index, place, meter)
    return StreamSource(index, ArrivalMap(place), meter)


def tell_start(url: str, data_dir: Path, node: NodeStream, order: SampleOrder) -> None:
    """Says what is streamed, and whether the disk will hold it."""
    log.info(
        "streams %s to %s: %.2f GB, %.2f GB free; order: %s",
        printable(redact(url)),
        data_dir,
        node.num_bytes / 1e9,
        shutil.disk_usage(data_dir).free / 1e9,
        order.describe(),
    )
