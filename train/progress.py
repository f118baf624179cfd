"""Where a run stands besides its weights: what a checkpoint needs to go on as if never stopped."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from train.evaluate import Accuracy


@dataclass(frozen=True)
class EpochSums:
    """Totals over all ranks, and over the attempts that worked on this epoch."""

    loss: float = 0.0  # summed over images
    correct: float = 0.0
    images: int = 0
    seconds: float = 0.0
    data_wait_s: float = 0.0
    skipped: int = 0

    def __add__(self, other: EpochSums) -> EpochSums:
        pairs = zip(self.__dict__.values(), other.__dict__.values(), strict=True)
        return EpochSums(*(a + b for a, b in pairs))


@dataclass
class Progress:
    """The results so far and the epoch under way; the same on every rank."""

    sums: EpochSums = EpochSums()  # of the epoch under way, by earlier attempts
    is_evaluated: bool = True  # False: the epoch is trained, its validation and record are due
    result: dict[str, Any] = field(default_factory=lambda: {"final_acc1": None, "final_acc5": None})
    best: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_state(cls, state: dict[str, Any] | None) -> Progress:
        """The progress of a checkpoint, or that of a fresh run."""
        if state is None:
            return cls()
        sums = EpochSums(**state["epoch_sums"])
        return cls(sums, state["is_evaluated"], state["result"], state["best"])

    def to_state(self, sums: EpochSums) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {
            "epoch_sums": dataclasses.asdict(sums),
            "is_evaluated": self.is_evaluated,
            "result": self.result,
            "best": self.best,
        }

    def take(self, epoch: int, results: list[Accuracy]) -> bool:
        """Whether the results of an epoch, which it takes up, are the best so far."""
        for suffix, accuracy in zip(("", "_ema"), results, strict=False):
            self.result[f"final_acc1{suffix}"] = accuracy.acc1
            self.result[f"final_acc5{suffix}"] = accuracy.acc5
        if not results or results[0].acc1 <= self.best.get("best_acc1", -math.inf):
            return False
        acc1, acc5 = results[0].acc1, results[0].acc5
        self.best = {"best_acc1": acc1, "best_acc5": acc5, "best_epoch": epoch}
        return True
