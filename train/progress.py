"""The state of a run besides its weights: what a checkpoint needs to continue seamlessly."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from dataset.errors import UserError
from train.evaluate import Accuracy


@dataclass(frozen=True)
class EpochSums:
    """Totals over all ranks, and over all attempts at this epoch."""

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
    """The results so far and the current epoch; the same on every rank."""

    sums: EpochSums = EpochSums()  # of the epoch under way, by earlier attempts
    is_evaluated: bool = True  # False: the epoch is trained, its validation and record are due
    result: dict[str, Any] = field(default_factory=lambda: {"final_acc1": None, "final_acc5": None})
    best: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_state(cls, state: dict[str, Any] | None) -> Progress:
        """The progress of a checkpoint, or that of a fresh run."""
        if state is None:
            return cls()
        result, best, sums = state["result"], state["best"], state["epoch_sums"]
        is_known = sums.keys() == EpochSums().__dict__.keys()
        values = [*sums.values(), *(v for v in (*result.values(), *best.values()) if v is not None)]
        if not is_known or not all(type(value) in (int, float) for value in values):
            raise UserError("the checkpoint's sums or results are not numbers; use another one")
        return cls(EpochSums(**sums), state["is_evaluated"], result, best)

    def to_state(self, sums: EpochSums) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {
            "epoch_sums": dataclasses.asdict(sums),
            "is_evaluated": self.is_evaluated,
            "result": self.result,
            "best": self.best,
        }

    def take(self, epoch: int, results: list[Accuracy]) -> bool:
        """Adds the results of an epoch; True if they are the best so far."""
        for suffix, accuracy in zip(("", "_ema"), results, strict=False):
            self.result[f"final_acc1{suffix}"] = accuracy.acc1
            self.result[f"final_acc5{suffix}"] = accuracy.acc5
        if not results or not self._is_best(results[0]):
            return False
        acc1, acc5, loss = results[0].acc1, results[0].acc5, results[0].loss
        self.best = {"best_acc1": acc1, "best_acc5": acc5, "best_epoch": epoch}
        self.best["best_loss"] = loss if math.isfinite(loss) else None
        return True

    def _is_best(self, result: Accuracy) -> bool:
        """Whether the accuracy is the highest so far, or equal to it with a lower loss."""
        best = self.best.get("best_acc1", -math.inf)
        if result.acc1 != best:
            return bool(result.acc1 > best)
        best_loss = self.best.get("best_loss", -math.inf)  # not known in older checkpoints
        return bool(result.loss < (math.inf if best_loss is None else best_loss))
