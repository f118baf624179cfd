"""The recipe for a batch size, from the table of recipes, and the schedules (no torch)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dataset.errors import UserError
from train.recipe_table import PUBLISHED_EPOCHS, REPRODUCED, TABLE, Published, Recipe

__all__ = ["FLAGS", "RECIPES", "Recipe", "choose_recipe", "describe", "lr_at", "resolve_recipe"]

RECIPES = ("reference", "sgd", "lars", "auto")
LARS_FROM_BATCH = 4096  # auto: the smallest batch at which LARS is taken
STEP_EPOCHS = 30  # schedule 'step': a tenth of the rate after each 30 epochs


# The override keys, each with its flag and the field of Recipe that it sets.
FLAGS = {
    "lr": ("--lr", "lr"),
    "momentum": ("--momentum", "momentum"),
    "wd": ("--wd", "weight_decay"),
    "warmup_epochs": ("--warmup-epochs", "warmup_epochs"),
    "label_smoothing": ("--label-smoothing", "label_smoothing"),
    "lars_eta": ("--lars-eta", "lars_eta"),
    "lars_eps": ("--lars-eps", "lars_eps"),
}
_LARS_ONLY = ("lars_eta", "lars_eps")


def choose_recipe(name: str, batch_size: int) -> str:
    """The recipe that name stands for at this batch; a scaling study pins its first answer."""
    if name not in RECIPES:
        raise UserError(f"--recipe {name} is unknown; choose one of {', '.join(RECIPES)}")
    if name != "auto":
        return name
    return "lars" if batch_size >= LARS_FROM_BATCH else "sgd"


def resolve_recipe(
    name: str, batch_size: int, epochs: int, overrides: Mapping[str, float | None]
) -> Recipe:
    """The recipe for a global batch and a number of epochs, with notes on what is unpublished."""
    if batch_size < 1:
        raise UserError(
            f"--batch-size {batch_size} is too small; give 1 or more (the global batch)"
        )
    if epochs < 1:
        raise UserError(f"--epochs {epochs} is too small; give 1 or more")
    chosen = choose_recipe(name, batch_size)
    recipe = _scale_to_batch(TABLE[chosen], batch_size)
    if name == "auto":
        side = "from" if chosen == "lars" else "below"
        recipe = _note(recipe, f"auto took {chosen}: {side} a batch of {LARS_FROM_BATCH}")
    recipe = _fit_to_epochs(recipe, epochs, overrides.get("warmup_epochs") is not None)
    return _override(recipe, epochs, overrides)


def _note(recipe: Recipe, text: str) -> Recipe:
    return replace(recipe, notes=(*recipe.notes, text))


def _scale_to_batch(published: Published, batch_size: int) -> Recipe:
    """The base recipe with the values of a published point, or scaled from the nearest."""
    points = published.points
    below = max((b for b in points if b <= batch_size), default=min(points))
    above = min((b for b in points if b >= batch_size), default=max(points))
    near = points[below]
    if published.scaling == "linear":
        lr = batch_size / 1000
    elif published.scaling == "sqrt":
        lr = near.lr * math.sqrt(batch_size / below)
    else:
        lr = near.lr
    share = (batch_size - below) / (above - below) if above > below else 0.0
    warmup_epochs = near.warmup_epochs + share * (points[above].warmup_epochs - near.warmup_epochs)
    recipe = replace(
        published.base,
        lr=points[batch_size].lr if batch_size in points else lr,
        weight_decay=near.weight_decay,
        warmup_epochs=warmup_epochs,
        lars_eps=near.lars_eps,
    )
    if batch_size in points:
        return recipe
    return _note(recipe, _unpublished(published, batch_size, below, above))


def _unpublished(published: Published, batch_size: int, below: int, above: int) -> str:
    """The sentence about a batch that the source did not publish."""
    name = published.base.name
    how = {
        "keep": "the LR stays at 0.1, as pytorch/examples leaves it, unless --lr is given",
        "linear": "the LR goes linearly with the batch",
        "sqrt": "the LR goes by the square root of the batch",
    }[published.scaling]
    if below < batch_size < above:
        return f"batch {batch_size} is between the published points {below} and {above}: {how}"
    if batch_size < below:
        return f"batch {batch_size} is below the smallest published for {name}, {below}: {how}"
    advice = {
        "reference": "",
        "sgd": "; --recipe lars is published up to 32768",
        "lars": "; nobody has shown that accuracy holds there",
    }[name]
    return f"batch {batch_size} is above the largest published for {name}, {below}: {how}{advice}"


def _fit_to_epochs(recipe: Recipe, epochs: int, has_own_warmup: bool) -> Recipe:
    """A short training gets the same share of warm-up; the published lengths are for 90 epochs."""
    if recipe.schedule == "step" and epochs <= STEP_EPOCHS:
        text = f"the LR drops after each {STEP_EPOCHS} epochs, so never in {epochs}"
        recipe = _note(recipe, text)
    if epochs >= PUBLISHED_EPOCHS or recipe.warmup_epochs == 0 or has_own_warmup:
        return recipe
    shorter = recipe.warmup_epochs * epochs / PUBLISHED_EPOCHS
    text = (
        f"warm-up shortened from {recipe.warmup_epochs:g} to {shorter:.3g} epochs: the same share"
        f" of {epochs} {'epoch' if epochs == 1 else 'epochs'} as of the published "
        f"{PUBLISHED_EPOCHS}"
    )
    return _note(replace(recipe, warmup_epochs=shorter), text)


def _override(recipe: Recipe, epochs: int, overrides: Mapping[str, float | None]) -> Recipe:
    """The recipe with the values that the user gave, each checked and noted."""
    for key, value in overrides.items():
        if key not in FLAGS:
            known = ", ".join(flag for flag, _ in FLAGS.values())
            raise UserError(f"{key} is not read by recipe {recipe.name}; it reads {known}")
        if value is None:
            continue
        flag, field = FLAGS[key]
        if key in _LARS_ONLY and recipe.optimizer != "lars":
            raise UserError(
                f"{flag} is not read by recipe {recipe.name}; leave it out or give --recipe lars"
            )
        _check_value(flag, field, value, epochs)
        published = getattr(recipe, field)
        if value != published:
            text = f"{flag} {value:g} was given in place of the recipe's {published:.6g}"
            changed: dict[str, Any] = {field: float(value)}
            recipe = _note(replace(recipe, **changed), text)
    return recipe


def _check_value(flag: str, field: str, value: float, epochs: int) -> None:
    if not math.isfinite(value) or value < 0:
        raise UserError(f"{flag} {value:g} is not a value to train with; give 0 or more")
    if field in ("momentum", "label_smoothing") and value >= 1:
        raise UserError(f"{flag} {value:g} is too large; give a value in [0, 1)")
    if field in ("lr", "lars_eta") and value == 0:
        raise UserError(f"{flag} 0 would train nothing; give a value above 0, or -e to evaluate")
    if field == "warmup_epochs" and value > epochs:
        raise UserError(
            f"{flag} {value:g} is longer than the training of {epochs} epochs;"
            f" give at most {epochs}, or more --epochs"
        )


def lr_at(recipe: Recipe, step: int, steps_per_epoch: float, total_steps: int) -> float:
    """The rate of optimiser step `step` (from 0): a function of the step, so exact on resume."""
    num_warmup = round(recipe.warmup_epochs * steps_per_epoch)
    if step < num_warmup:
        return recipe.lr * (step + 1) / num_warmup
    if recipe.schedule == "step":
        return float(recipe.lr * 0.1 ** (step // steps_per_epoch // STEP_EPOCHS))
    left = max(0.0, 1 - (step - num_warmup) / max(1, total_steps - num_warmup))
    if recipe.schedule == "cosine":
        return recipe.lr * 0.5 * (1 - math.cos(math.pi * left))
    assert recipe.schedule == "poly2", recipe.schedule
    return recipe.lr * left * left


def describe(recipe: Recipe, batch_size: int) -> str:
    """The text of --show-recipe: every value that will be used, from where, and the notes."""
    ends = {
        "step": f"/10 after each {STEP_EPOCHS} epochs",
        "cosine": "cosine to 0, per step",
        "poly2": "polynomial of power 2 to 0, per step",
    }
    rows = {
        "recipe": f"{recipe.name} for a global batch of {batch_size}",
        "optimizer": f"{recipe.optimizer.upper()}, momentum {recipe.momentum:g}",
        "lr": f"{recipe.lr:.4g}, {ends[recipe.schedule]}",
        "warm-up": f"{recipe.warmup_epochs:.4g} epochs" if recipe.warmup_epochs else "none",
        "weight decay": f"{recipe.weight_decay:.4g}, "
        + ("on all weights" if recipe.decay_norm_and_bias else "none on batch norm and bias"),
        "label smoothing": f"{recipe.label_smoothing:g}",
        "last gamma": "starts at 0" if recipe.zero_init_gamma else "starts at 1",
    }
    if recipe.optimizer == "lars":
        rows["lars"] = f"eta {recipe.lars_eta:g}, epsilon {recipe.lars_eps:g}"
    rows["source"] = f"published by {recipe.source}"
    rows["accuracy"] = _describe_accuracy(recipe, batch_size)
    lines = [f"{name:<16}{text}" for name, text in rows.items()]
    return "\n".join([*lines, *(f"note: {note}" for note in recipe.notes)])


def _describe_accuracy(recipe: Recipe, batch_size: int) -> str:
    name, published = recipe.name, TABLE[recipe.name]
    point = published.points.get(batch_size)
    if point is None:
        return "none published for this batch, not reproduced here"
    if replace(recipe, notes=()) != _scale_to_batch(published, batch_size):
        return "none published for the values below that differ, not reproduced here"
    if (name, batch_size) in REPRODUCED:
        return f"reproduced here: {REPRODUCED[name, batch_size]}"
    remark = f" ({point.remark})" if point.remark else ""
    if point.acc1_pct is None:
        return f"none published for this batch{remark}, not reproduced here"
    group = f"{point.batch_per_gpu} images a GPU, {PUBLISHED_EPOCHS} epochs"
    return f"top-1 {point.acc1_pct:.2f} % published ({group}), not reproduced here{remark}"
