"""A run whose tar is still arriving: planned, opened, fetched by need, proven, and recorded.

The first rank plans the stream and keeps its fetcher, a process of its own. All ranks read the
partial file, and see in a map what is here (train/data/stream_source.py). Maps, plan and task lie
in a temporary folder of the node.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dataset.errors import UserError
from dataset.federation.lookup import Options
from dataset.redaction import printable, redact
from dataset.stream.arrivals import Arrivals, State
from dataset.stream.node import NodeStream
from dataset.stream.plan import Refusal, StreamPlan, plan_stream
from dataset.stream.spec import NEVER, Needs, StreamSpec
from train.config import TrainConfig
from train.data.bounded_cache import BoundedCache, open_cache, open_units
from train.data.needs import count_ahead, count_first_steps, find_needs
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
from train.stream_end import await_verification, prove_classes

log = logging.getLogger("trainyard")


class Stream:
    """The stream of a run on one rank; of a run that does not stream, nothing."""

    def __init__(self, cfg: TrainConfig, launch: Launch, comm: Comm) -> None:
        self._cfg, self._launch, self._comm = cfg, launch, comm
        self._node: NodeStream | None = None
        self._sources: list[StreamSource] = []  # training, then validation if that streams too
        self._meters: list[NetworkMeter] = []  # of all ranks
        self._has_started = False  # on rank 0
        self._needs: Needs = np.zeros(0, np.int32)
        self._first_step = 0
        self._cache: BoundedCache | None = None  # rank 0's, with --cache-limit

    @property
    def is_on(self) -> bool:
        return self._node is not None

    # Before the first step: all ranks together

    def plan(self, num_nodes: int) -> bool:
        """Whether DATA is streamed; says why it is not, unless it is here already."""
        cfg = self._cfg
        if not cfg.urls or cfg.stream == "never" or cfg.evaluate:
            return False
        found: StreamPlan | Refusal | None = None
        if num_nodes > 1:
            found = refuse_nodes(num_nodes)
        elif cfg.val_share:
            found = Refusal("--val-share validates on images of the training tar itself")
        elif self._launch.is_main:
            found = self._ask()
        self._comm.say_done("plan")
        self._comm.wait_until_done("plan", self._comm.world_size)  # for as long as it takes
        found = self._comm.from_main(found)
        if isinstance(found, Refusal):
            self._refuse(found)
        elif isinstance(found, StreamPlan) and not found.train.is_here:
            node = NodeStream.create(found) if self._launch.is_main else None
            self._node = self._comm.from_main(node)
        return self.is_on

    def _ask(self) -> StreamPlan | Refusal:
        cfg = self._cfg
        return plan_stream(
            cfg.data,
            self._data_dir,
            index=cfg.index or "",
            federation=cfg.federation,
            token=cfg.token,
            options=Options(give_up_s=cfg.give_up_s),
            is_bounded=bool(cfg.cache_bytes),
        )

    @property
    def _data_dir(self) -> Path:
        return self._cfg.data_dir or Path("data")

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
        self._meters = [NetworkMeter(self._node.folder / f"meter-{n}") for n in range(world_size)]
        # Sooner than the other ranks would take this one for hanging.
        max_wait_s = 0.8 * 60 * self._cfg.timeout_minutes if world_size > 1 else math.inf
        splits = (dataset.train, dataset.val)
        self._sources = [source for source in splits if isinstance(source, StreamSource)]
        for source in self._sources:
            source.count_on(self._meters[rank], rank, max_wait_s)

    def start(self, order: SampleOrder, state: Mapping[str, Any] | None) -> None:
        """Rank 0 writes down what the run needs when, and starts the fetcher."""
        assert self._node is not None
        cfg, train, node = self._cfg, self._sources[0], self._node
        self._first_step = step = state["step"] if state is not None else 0
        per_epoch = len(train) // cfg.batch_size
        if not self._launch.is_main or not per_epoch:  # a batch of more than all is refused soon
            return
        total = min(cfg.epochs * per_epoch, cfg.max_steps or cfg.epochs * per_epoch)
        if isinstance(train, UnitSource):
            steps = RunSteps(order, cfg.seed, cfg.batch_size, step, total)
            self._cache = open_cache(cfg.cache_bytes, train, node.plan.val, steps, node.folder)
        else:
            self._needs = find_needs(train, order, cfg.seed, cfg.batch_size, step, total - 1)
        spec = StreamSpec(
            str(self._data_dir),
            node.describe("train", None if self._cache else self._needs),
            node.describe("val") if "val" in node.objects else None,
            val_first=state is not None and not state["is_evaluated"],
            first_steps=count_first_steps(order, len(train), cfg.batch_size, step),
            federation=cfg.federation,
            token=str(cfg.token) if cfg.token else None,
            give_up_s=cfg.give_up_s,
            cache=self._cache.make_spec(self._comm.world_size) if self._cache else None,
        )
        node.start(spec, [source.arrivals for source in self._sources])
        self._has_started = True
        tell_start(cfg.data, self._data_dir, node, order)

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
        """Rank 0 looks at the class tars that have come; raises if the index has one wrong."""
        if self._launch.is_main:
            for source in self._sources:
                source.list_unproven()

    def describe(self) -> dict[str, Any]:
        """For the record of this attempt; of a run that does not stream, nothing."""
        if self._node is None or not self._has_started:
            return {}
        tallies = [source.arrivals.tally for source in self._sources]
        causes = {cause for tally in tallies for cause in tally.twice or {}}
        waited = [meter.waited_s for meter in self._meters]
        stream = {
            "bytes_fetched": sum(tally.fetched for tally in tallies),
            "bytes_resumed": sum(tally.resumed for tally in tallies),
            "bytes_twice": {
                cause: sum((tally.twice or {}).get(cause, 0) for tally in tallies)
                for cause in sorted(causes)
            },
            "hits": sum(meter.hits for meter in self._meters),
            "misses": sum(meter.misses for meter in self._meters),
            "network_wait_s": sum(waited) / len(waited),
            "fetcher_restarts": self._node.num_restarts,
            "index": "proven" if self._node.plan.train.is_proven else "unproven",
            "is_whole": all(source.arrivals.state is State.WHOLE for source in self._sources),
        }
        return {"stream": stream | (self._cache.describe() if self._cache else {})}

    # At the end

    def finish(self, ask: Callable[[], Vote]) -> Vote:
        """All is trained: proves the last classes, and lets a verification end; asks for a stop."""
        if not self.is_on:
            return Vote.GO_ON
        vote = Vote.GO_ON
        if self._launch.is_main:
            vote = prove_classes(self._sources, ask)
            vote = vote if vote.is_urgent else await_verification(self._sources, ask)
        self._comm.say_done("stream")
        self._comm.wait_until_done("stream", self._comm.world_size)
        return Vote(self._comm.from_main(vote))

    def close(self) -> None:
        """Ends the fetcher and removes the folder of the node; what has arrived stays."""
        if self._node is not None and self._launch.is_main:
            self._node.stop()
            self._node.remove()


def refuse_nodes(num_nodes: int) -> Refusal:
    """Why a job of several nodes does not stream."""
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
    return StreamSource(index, Arrivals(place), meter)


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
