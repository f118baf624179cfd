"""What the fetcher of a run is told: which objects, and in which order of need (no torch)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataset.federation.lookup import Options
from dataset.stream.node import NodeStream
from dataset.stream.plan import Refusal, StreamPlan, plan_stream
from dataset.stream.spec import CacheSpec, Needs, StreamSpec
from train.config import TrainConfig
from train.data.needs import count_first_steps
from train.data.sample_order import SampleOrder


@dataclass(frozen=True)
class Task:
    """A run from its next step on, in the order of its samples."""

    cfg: TrainConfig
    order: SampleOrder
    num_samples: int
    step: int = 0
    val_first: bool = False  # a run that goes on validates before its first step

    @property
    def total_steps(self) -> int:
        """The steps of the whole run; 0 if a batch is more than all."""
        all_steps = self.cfg.epochs * (self.num_samples // self.cfg.batch_size)
        return min(all_steps, self.cfg.max_steps or all_steps)

    @property
    def identity(self) -> dict[str, Any]:
        """Two tasks on the same objects and flags with the same identity are the same."""
        own = {"num_samples": self.num_samples, "step": self.step, "val_first": self.val_first}
        return self.order.identity | own

    def make_spec(
        self, node: NodeStream, needs: Needs | None, cache: CacheSpec | None = None
    ) -> StreamSpec:
        """The task as the fetcher reads it; needs: None where the cache has a plan of its own."""
        cfg = self.cfg
        return StreamSpec(
            str(fetch_folder(cfg)),
            node.describe("train", needs),
            node.describe("val") if "val" in node.objects else None,
            val_first=self.val_first,
            first_steps=count_first_steps(self.order, self.num_samples, cfg.batch_size, self.step),
            federation=cfg.federation,
            token=str(cfg.token) if cfg.token else None,
            give_up_s=cfg.give_up_s,
            cache=cache,
        )


def fetch_folder(cfg: TrainConfig) -> Path:
    """The folder that URLs are fetched to."""
    return cfg.data_dir or Path("data")


def wants_stream(cfg: TrainConfig) -> bool:
    """Whether the flags leave it to the object whether it is streamed."""
    needs_images = not (cfg.evaluate or cfg.dummy)
    return bool(cfg.urls) and cfg.stream != "never" and needs_images


def ask_for_plan(
    cfg: TrainConfig,
    *,
    is_bounded: bool,
    index_alone: bool = False,
    give_up_s: float = math.inf,
) -> StreamPlan | Refusal:
    """How DATA can be streamed, or why not; bounded: only a part of it is on the disk at a time.

    give_up_s: raises PassingError after so long without an answer, if --give-up-after is longer.
    """
    return plan_stream(
        cfg.data,
        fetch_folder(cfg),
        index=cfg.index or "",
        federation=cfg.federation,
        token=cfg.token,
        options=Options(give_up_s=min(cfg.give_up_s, give_up_s)),
        is_bounded=is_bounded,
        index_alone=index_alone,
    )
