"""Accuracy that counts every validation image once: in a run, or on its own with -e."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from dataset.errors import UserError
from train.data.batches import Batch, check_skipped
from train.data.sampler import ValidationShare
from train.failure import Diverged
from train.feed import open_validation
from train.prepare import Setup
from train.ranks.comm import Comm
from train.ranks.interrupt import Vote
from train.ranks.watch import READING
from train.records.predictions import Predictions, save_predictions
from train.records.stage_meter import measure_stage
from train.step import Placement, Trainer

log = logging.getLogger("trainyard")

Model = Callable[[torch.Tensor], torch.Tensor]
MAX_LOSS = 2.0**32  # of a rank: 2**20 times it, summed over 1024 ranks, fits 64 bits


@dataclass(frozen=True)
class Accuracy:
    """Integer counts over the whole validation set."""

    correct1: int
    correct5: int
    images: int
    skipped: int
    loss: float  # the mean; NaN where it is no number, or too large a one

    @property
    def acc1(self) -> float:
        return 100.0 * self.correct1 / max(self.images, 1)

    @property
    def acc5(self) -> float:
        return 100.0 * self.correct5 / max(self.images, 1)


def validate(
    setup: Setup,
    trainer: Trainer,
    comm: Comm,
    batches: Iterator[Batch],
    agree: Callable[[float], Vote] = lambda _: Vote.GO_ON,
    notes: Sequence[Predictions] = (),
) -> tuple[Vote, list[Accuracy]]:
    """The ranks' vote, and the accuracy of the weights and of their average."""
    if not setup.num_val:
        return Vote.GO_ON, []
    models = [frozen(trainer.model)]
    if trainer.ema:
        models.append(frozen(trainer.model, trainer.ema.state_dict()))
    vote, results = evaluate(models, batches, setup.val_share, setup.placement, comm, agree, notes)
    if results:
        check_skipped(results[0].skipped, setup.cfg.skip_bad_images)
    return vote, results


def evaluate_only(setup: Setup, trainer: Trainer, comm: Comm, folder: Path | None) -> None:
    """Prints the accuracy of the trainer's weights, and of their averages where it has them.

    What was found for each image is written beside it.
    """
    if not setup.num_val:
        raise UserError(
            f"{setup.cfg.data} has no validation images; -e needs val/, its tar or --val-share"
        )
    notes = [Predictions() for _ in range(2 if trainer.ema else 1)]
    with measure_stage("evaluate", folder) as stage:
        batches = open_validation(setup)
        _, results = validate(setup, trainer, comm, batches, notes=notes)
        stage.extra["images"] = results[0].images
        for suffix, result in zip(("", "_ema"), results, strict=False):
            stage.extra |= {f"acc1{suffix}": result.acc1, f"acc5{suffix}": result.acc5}
    for kind, result in zip(("", "averaged weights: "), results, strict=False):
        log.info(
            "%sacc1 %.3f (%d) acc5 %.3f (%d) of %d images, loss %.4f",
            kind,
            result.acc1,
            result.correct1,
            result.acc5,
            result.correct5,
            result.images,
            result.loss,
        )
    if not all(math.isfinite(result.loss) for result in results):
        raise Diverged("the validation loss is not finite: these weights are useless")
    for suffix, found in zip(("", "_ema"), notes, strict=False):
        save_predictions(found, setup, comm, suffix)


@torch.no_grad()
def evaluate(
    models: list[Model],
    batches: Iterator[Batch],
    share: ValidationShare,
    placement: Placement,
    comm: Comm,
    agree: Callable[[float], Vote] = lambda _: Vote.GO_ON,
    notes: Sequence[Predictions] = (),
) -> tuple[Vote, list[Accuracy]]:
    """The ranks' vote, and the accuracy of each model: integer sums and one all-reduce.

    An urgent vote leaves the validation unfinished, without results. With `notes`, one for each
    model, what was found for each image goes there too.
    """
    vote = Vote.GO_ON
    # Top-1, top-5, counted, skipped, losses that are not finite; then the sum of the losses.
    counts = torch.zeros(len(models), 5, dtype=torch.int64, device=placement.device)
    losses = torch.zeros(len(models), dtype=torch.float64, device=placement.device)
    for number in range(share.num_batches):
        is_common = number < share.num_common
        if is_common:
            vote = max(vote, agree(0.0))
        if vote.is_urgent:
            return vote, []
        if is_common:
            comm.advance(READING)
        batch = next(batches)
        if is_common:
            comm.advance("evaluating")
        for name in batch.skipped:
            log.warning("a validation image cannot be decoded: %s", name)
        _add_batch(models, batch, placement, counts, losses, notes)
    comm.advance("adding up the evaluation")
    return vote, _add_up(counts, losses, share.num_images, comm)


def _add_batch(
    models: list[Model],
    batch: Batch,
    placement: Placement,
    counts: torch.Tensor,
    losses: torch.Tensor,
    notes: Sequence[Predictions],
) -> None:
    images = placement.normalise(batch.images.to(placement.device, non_blocking=True))
    labels = batch.labels.to(placement.device, non_blocking=True)
    for number, model in enumerate(models):
        with placement.autocast():
            outputs = model(images)
        best = outputs.topk(min(5, outputs.shape[1]), dim=1).indices
        counts[number, :4] += _count(best, labels)
        losses[number] += _sum_loss(outputs, labels)
        if notes:
            notes[number].add(batch.images.to(placement.device), labels, outputs, best)


def _add_up(
    counts: torch.Tensor, losses: torch.Tensor, num_images: int, comm: Comm
) -> list[Accuracy]:
    """The results over all ranks, in one exchange, with the loss as a whole number."""
    is_number = losses < MAX_LOSS
    counts[:, 4] = ~is_number
    fixed = torch.where(is_number, losses, 0.0).mul(2**20).round().long()
    packed = comm.sum(torch.cat([counts, fixed[:, None]], dim=1))
    results = []
    for correct1, correct5, counted, skipped, bad, loss in packed.tolist():
        assert counted + skipped == num_images, (counted, skipped, num_images)
        mean_loss = math.nan if bad else loss / 2**20 / max(counted, 1)
        results.append(Accuracy(correct1, correct5, counted, skipped, mean_loss))
    return results


def frozen(model: nn.Module, weights: dict[str, torch.Tensor] | None = None) -> Model:
    """The model as a function, with the given weights instead of its own."""

    def call(images: torch.Tensor) -> torch.Tensor:
        model.eval()
        if weights is None:
            output: torch.Tensor = model(images)
            return output
        swapped: torch.Tensor = torch.func.functional_call(model, weights, (images,))
        return swapped

    return call


def _count(best: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(top-1, top-5, counted, skipped); with fewer than 5 classes top-5 is top-all."""
    hits = best == labels[:, None]  # a skipped image has label -1
    is_counted = labels >= 0
    return torch.stack([hits[:, 0].sum(), hits.sum(), is_counted.sum(), (~is_counted).sum()])


def _sum_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs.float(), labels, ignore_index=-1, reduction="sum")
