"""A stream that begins while torch is still being imported, which takes seconds (no torch).

Only for a run of one rank: several plan together, once they have met. It is a guess that the run is
a new one. If it turns out to go on from a checkpoint, the fetcher is given another task
(train/stream/run_stream.py), and what has arrived is kept.
"""

from __future__ import annotations

import numpy as np

from dataset.errors import PassingError
from dataset.stream.arrivals import ArrivalMap
from dataset.stream.node import NodeStream
from dataset.stream.plan import Refusal, StreamPlan
from dataset.stream.spec import Needs
from train.config import TrainConfig
from train.data.needs import find_needs
from train.data.network_meter import NetworkMeter
from train.data.sample_order import STREAMED, SampleOrder, name_order, order_as_before
from train.data.stream_source import StreamSource
from train.data.tar_layout import find_layout
from train.ranks.launch import Launch
from train.stream.task import Task, ask_for_plan, wants_stream

PLAN_S = 10.0  # without an answer: what needs torch to be checked would be told that much later


class EarlyStream:
    """A plan, and the fetcher that follows it already; of a run that does not stream, nothing."""

    def __init__(self) -> None:
        self.plan: StreamPlan | Refusal | None = None
        self.node: NodeStream | None = None
        self.needs: Needs = np.zeros(0, np.int32)
        self._task: Task | None = None

    def begin(self, cfg: TrainConfig) -> None:
        """Starts the fetcher on what a new run needs, in the order of its steps."""
        plan = self.plan
        if not isinstance(plan, StreamPlan) or plan.train.is_here or plan.is_bounded:
            return
        self.node = node = NodeStream.create(plan)
        if node.whole_val:  # which is fetched first, into the same folder
            return
        arrivals = [ArrivalMap(node.map_path(name)) for name in node.objects]
        meter = NetworkMeter(node.folder / "meter-0")
        train = StreamSource(plan.train.load_index(), arrivals[0], meter)
        task = Task(cfg, _choose_order(cfg, train), len(train))
        if not task.total_steps:  # refused soon
            return
        last = task.total_steps - 1
        self.needs = find_needs(train, task.order, cfg.seed, cfg.batch_size, 0, last)
        node.start(task.make_spec(node, self.needs), arrivals)
        self._task = task

    def follows(self, task: Task) -> bool:
        """Whether the fetcher already works on a task."""
        return self._task is not None and self._task.identity == task.identity

    def forget(self) -> None:
        """Removes the folder at once, before this process ends."""
        if self.node is not None:
            self.node.kill()  # it would say that its folder is gone
            self.node.remove()

    def close(self) -> None:
        """Ends the fetcher and removes its folder; what has arrived stays. May be called again."""
        if self.node is not None:
            self.node.stop()
            self.node.remove()


def begin_early(cfg: TrainConfig, launch: Launch) -> EarlyStream:
    """The stream of a run of one rank that seems to be new, begun; of any other, nothing."""
    early = EarlyStream()
    # Several ranks find out together what is wrong with a URL, so that one of them says it.
    is_skipped = cfg.show_recipe or cfg.val_share or launch.world_size > 1
    if not is_skipped and wants_stream(cfg):
        early.plan = _plan_quickly(cfg)
        if not _may_go_on(cfg):
            try:
                early.begin(cfg)
            except BaseException:
                early.close()
                raise
    return early


def _plan_quickly(cfg: TrainConfig) -> StreamPlan | Refusal | None:
    """The plan, if the network answers soon; else the run makes it, once the flags are checked."""
    try:
        return ask_for_plan(cfg, is_bounded=bool(cfg.cache_bytes), give_up_s=PLAN_S)
    except PassingError:
        return None


def _may_go_on(cfg: TrainConfig) -> bool:
    """Whether there is an earlier attempt by what the flags name."""
    return cfg.resume is not None or (cfg.output is not None and (cfg.output / "ckpt").exists())


def _choose_order(cfg: TrainConfig, train: StreamSource) -> SampleOrder:
    """The order of a new run, as train/prepare.py will choose it."""
    if name_order(cfg.order_name, {}, STREAMED) != STREAMED:
        return SampleOrder()
    layout, units = find_layout(train, train.index.tar, cfg.index_dir)
    return order_as_before(layout, units, cfg.batch_size, {}, cfg.order_lanes)
