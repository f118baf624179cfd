"""The current epoch and the results so far: sums over ranks and attempts, lines, records."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from dataset.errors import UserError
from train.data.batches import check_skipped
from train.evaluate import Accuracy
from train.failure import ADVICE, Diverged
from train.ranks.comm import Comm
from train.records.phases import PhaseClock
from train.step import Trainer

log = logging.getLogger("trainyard")

WARMUP_STEPS = 5  # of an attempt: not part of the steady-state speed


@dataclass(frozen=True)
class EpochSums:
    """Totals over all ranks, and over all attempts at this epoch."""

    loss: float = 0.0  # summed over images
    correct: float = 0.0
    images: int = 0
    seconds: float = 0.0
    data_wait_s: float = 0.0
    skipped: int = 0
    network_wait_s: float = 0.0  # the part of data_wait_s in which reads waited for the network

    def __add__(self, other: EpochSums) -> EpochSums:
        pairs = zip(self.__dict__.values(), other.__dict__.values(), strict=True)
        return EpochSums(*(a + b for a, b in pairs))


@dataclass
class Standing:
    """Where a run stands besides its weights: what a checkpoint needs to continue seamlessly.

    It is the same on every rank.
    """

    sums: EpochSums = EpochSums()  # of the epoch under way, by earlier attempts
    is_evaluated: bool = True  # False: the epoch is trained, its validation and record are due
    result: dict[str, Any] = field(default_factory=lambda: {"final_acc1": None, "final_acc5": None})
    best: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_state(cls, state: dict[str, Any] | None) -> Standing:
        """That of a checkpoint, or of a fresh run."""
        if state is None:
            return cls()
        result, best, sums = state["result"], state["best"], state["epoch_sums"]
        sums = {"network_wait_s": 0.0} | sums  # checkpoints from before there were streams
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


class EpochMeter:
    """Watches a trainer through one epoch after the other."""

    def __init__(self, trainer: Trainer, clock: PhaseClock, comm: Comm, standing: Standing) -> None:
        self._trainer, self._clock, self._comm = trainer, clock, comm
        self._standing = standing
        self.attempt_steps = 0
        self.time_to_first_step_s: float | None = None
        self._steady_images, self._steady_s = 0, 0.0
        self._steady_begin_s: float | None = None
        self._pending: tuple[int, torch.Tensor, Any] | None = None
        self._end_s: float | None = None
        self.begin()

    def begin(self) -> None:
        """Starts an epoch, or the rest of one (perhaps only its validation)."""
        is_due = not self._standing.is_evaluated
        per_epoch = self._trainer.plan.steps_per_epoch
        self.epoch, in_epoch = divmod(self._trainer.step - is_due, per_epoch)
        if in_epoch == 0 and not is_due:
            self._standing.sums = EpochSums()
        self._first_step = self._trainer.step
        self._begin_s = time.monotonic()
        self._end_s = self._begin_s if is_due else None  # its training is over already
        self._begin_wait_s = self._clock.seconds["data_wait"]
        self._begin_network_s = self._clock.network_s
        self._skipped = 0
        self._pending = None
        self._trainer.sums.zero_()
        self._start_steady()

    def count_step(self, skipped: list[str], allowed: int) -> None:
        """Counts a finished step and the images that were skipped in it."""
        for name in skipped:
            log.warning("skipped an image that cannot be decoded: %s", name)
        self._skipped += len(skipped)
        check_skipped(self._skipped, allowed)
        self.attempt_steps += 1
        if self.attempt_steps == 1:
            self._synchronise()
            self.time_to_first_step_s = self._clock.total_s
        if self.attempt_steps == WARMUP_STEPS:
            self._start_steady()

    def show_progress(self, total_steps: int, more: str = "") -> None:
        """Logs one line with the sums of the previous call, copied without waiting for the GPU."""
        step, sums = self._read_sums()
        images = (step - self._first_step) * self._trainer.plan.batch_size
        if images == 0:
            return
        loss, correct = (value * self._comm.world_size / images for value in sums)
        if not math.isfinite(loss):
            raise Diverged(f"the loss is {loss} at step {step}" + ADVICE)
        seconds = time.monotonic() - self._begin_s
        done = (self._trainer.step - self._first_step) * self._trainer.plan.batch_size
        wait_s = self._clock.seconds["data_wait"] - self._begin_wait_s
        log.info(
            "epoch %d step %d/%d  loss %.4f  acc1 %5.2f  lr %.5f  %.1f images/s  data wait %.0f %%"
            "%s",
            self.epoch + 1,  # people count from 1, the records from 0
            self._trainer.step,
            total_steps,
            loss,
            100 * correct,
            self._trainer.lr,
            done / seconds,
            100 * wait_s / seconds,
            more,
        )

    def end(self) -> None:
        """The training part of the epoch is over."""
        if self._steady_begin_s is not None:
            self._synchronise()
            self._steady_s += time.monotonic() - self._steady_begin_s
            self._steady_images += (
                self._trainer.step - self._steady_from
            ) * self._trainer.plan.batch_size
            self._steady_begin_s = None
        self._end_s = time.monotonic()  # the seconds of an epoch are those of its training

    @property
    def steady_images_per_s(self) -> float | None:
        """Images per second of training steps, with data wait and without warm-up."""
        return self._steady_images / self._steady_s if self._steady_images else None

    def total(self) -> EpochSums:
        """The epoch so far; every rank must call it."""
        loss, correct = self._trainer.sums.tolist()
        return self._add_up(self._comm.gather((loss, correct, self._skipped)))

    def estimate(self) -> EpochSums:
        """An estimate without the other ranks, as if they all had this rank's sums."""
        loss, correct = self._trainer.sums.tolist()
        return self._add_up([(loss, correct, self._skipped)] * self._comm.world_size)

    def _add_up(self, rows: list[tuple[float, float, int]]) -> EpochSums:
        now = EpochSums(
            loss=sum(row[0] for row in rows),
            correct=sum(row[1] for row in rows),
            images=(self._trainer.step - self._first_step) * self._trainer.plan.batch_size,
            seconds=(self._end_s or time.monotonic()) - self._begin_s,
            data_wait_s=self._clock.seconds["data_wait"] - self._begin_wait_s,
            skipped=sum(row[2] for row in rows),
            network_wait_s=self._clock.network_s - self._begin_network_s,
        )
        return self._standing.sums + now

    def _start_steady(self) -> None:
        if self.attempt_steps >= WARMUP_STEPS:
            self._synchronise()
            self._steady_begin_s, self._steady_from = time.monotonic(), self._trainer.step

    def _synchronise(self) -> None:
        if self._trainer.placement.device.type == "cuda":
            torch.cuda.synchronize()

    def _read_sums(self) -> tuple[int, list[float]]:
        """(step, [loss, correct]) of this rank; on a GPU of the previous call, to avoid waiting."""
        sums, step = self._trainer.sums, self._trainer.step
        if sums.device.type != "cuda":
            return step, sums.tolist()
        host = torch.empty_like(sums, device="cpu", pin_memory=True)
        host.copy_(sums, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        previous, self._pending = self._pending, (step, host, event)
        if previous is None:
            return self._first_step, [0.0, 0.0]
        previous[2].synchronize()
        return previous[0], previous[1].tolist()


def check_finite(sums: EpochSums) -> None:
    """Raises if the training loss of an epoch is not a finite number."""
    if not math.isfinite(sums.loss):
        raise Diverged(f"the training loss is {sums.loss}" + ADVICE)


def describe_epoch(
    epoch: int, trainer: Trainer, sums: EpochSums, results: list[Accuracy], eval_s: float
) -> dict[str, Any]:
    """The line of epochs.jsonl."""
    record: dict[str, Any] = {
        "epoch": epoch,
        "step": trainer.step,
        "lr": trainer.lr,
        "train_loss": sums.loss / sums.images,
        "train_acc1": 100 * sums.correct / sums.images,
        "images": sums.images,
        "seconds": sums.seconds,
        "images_per_s": sums.images / sums.seconds,
        "data_wait_s": sums.data_wait_s,
        "data_wait_network_s": sums.network_wait_s,
        "data_wait_decode_s": sums.data_wait_s - sums.network_wait_s,
        "eval_s": eval_s,
        "samples_dropped": trainer.plan.num_dropped,
        "samples_skipped": sums.skipped,
        "val_skipped": results[0].skipped if results else 0,
    }
    for suffix, result in zip(("", "_ema"), results, strict=False):
        # After only a few steps batch norm's statistics may be so far off that the loss overflows.
        record[f"val_loss{suffix}"] = result.loss if math.isfinite(result.loss) else None
        record[f"val_acc1{suffix}"] = result.acc1
        record[f"val_acc5{suffix}"] = result.acc5
    return record
