"""Validation: in a run, of the weights and of their average, or on its own with -e."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path

from dataset.errors import UserError
from train.data.batches import Batch
from train.epoch import check_skipped
from train.evaluate import Accuracy, evaluate, frozen
from train.failure import Diverged
from train.feed import open_validation
from train.prepare import Setup
from train.ranks.comm import Comm
from train.ranks.interrupt import Vote
from train.records.stage_meter import measure_stage
from train.step import Trainer

log = logging.getLogger("trainyard")


def validate(
    setup: Setup,
    trainer: Trainer,
    comm: Comm,
    batches: Iterator[Batch],
    agree: Callable[[float], Vote] = lambda _: Vote.GO_ON,
) -> tuple[Vote, list[Accuracy]]:
    """The ranks' vote, and the accuracy of the weights and of their average."""
    if not setup.num_val:
        return Vote.GO_ON, []
    models = [frozen(trainer.model)]
    if trainer.ema:
        models.append(frozen(trainer.model, trainer.ema.state_dict()))
    vote, results = evaluate(models, batches, setup.val_share, setup.placement, comm, agree)
    if results:
        check_skipped(results[0].skipped, setup.cfg.skip_bad_images)
    return vote, results


def evaluate_only(setup: Setup, trainer: Trainer, comm: Comm, folder: Path | None) -> None:
    """Prints the accuracy of the trainer's weights, and of their averages where it has them."""
    if not setup.num_val:
        raise UserError(f"{setup.cfg.data} has no validation images; -e needs val/ or its tar")
    with measure_stage("evaluate", folder) as stage:
        _, results = validate(setup, trainer, comm, open_validation(setup))
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
