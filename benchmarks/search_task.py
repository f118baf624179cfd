"""The table of benchmarks/search.py: the grid of flags, and the training of one cell of it."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from benchmarks.large_batch_task import Data, TrainingPlan, draw_images, train_run
from benchmarks.large_batch_task import Task as NetTask
from dataset.fake.archives import TRAIN, VAL
from train.recipe import Recipe, resolve_recipe

Cell = tuple[str, float, float]  # recipe, momentum, lr

NET = NetTask(
    num_classes=64, train_per_class=32, val_per_class=48, passes=4, epochs=4, eval_passes=4
)


@dataclass(frozen=True)
class SearchTask:
    """Everything that decides what is trained and what is searched."""

    recipes: tuple[str, ...] = ("sgd", "lars")
    momenta: tuple[float, ...] = (0.0, 0.5, 0.8, 0.95)
    lrs: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8)
    num_trials: int = 30
    num_seeds: int = 50
    net: NetTask = NET

    @property
    def cells(self) -> list[Cell]:
        return list(itertools.product(self.recipes, self.momenta, self.lrs))

    @property
    def space(self) -> Mapping[str, BaseDistribution]:
        """The axes of the table; a number is drawn as its place on its axis."""
        return {
            "recipe": CategoricalDistribution(self.recipes),
            "momentum": IntDistribution(0, len(self.momenta) - 1),
            "lr": IntDistribution(0, len(self.lrs) - 1),
        }

    def cell_of(self, drawn: Mapping[str, Any]) -> Cell:
        """The cell that a trial has drawn."""
        return drawn["recipe"], self.momenta[drawn["momentum"]], self.lrs[drawn["lr"]]

    def recipe_of(self, cell: Cell) -> Recipe:
        recipe, momentum, lr = cell
        own = {"momentum": momentum, "lr": lr}
        return resolve_recipe(recipe, self.net.small_batch, self.net.epochs, own)

    @property
    def digest(self) -> str:
        """Equal digests train the same; the recipes' values are part of it."""
        recipes = [self.recipe_of(cell) for cell in self.cells]
        return hashlib.sha256(repr((self.net, recipes)).encode()).hexdigest()[:12]


def draw_data(task: SearchTask) -> Data:
    """The pictures of all trainings, drawn once."""
    net = task.net
    return Data(
        *draw_images(net, TRAIN, net.train_per_class), *draw_images(net, VAL, net.val_per_class)
    )


def train_cell(
    task: SearchTask, data: Data, recipe: str, momentum: float, lr: float
) -> dict[str, Any]:
    """One training; all have the same first weights, the same order and the same windows."""
    start_s = time.monotonic()
    plan = TrainingPlan("", 1, task.recipe_of((recipe, momentum, lr)))
    rows = list(train_run(task.net, plan, 0, data))
    return {
        "recipe": recipe,
        "momentum": momentum,
        "lr": lr,
        "acc1_pct": [row["acc1_pct"] for row in rows],
        "seconds": round(time.monotonic() - start_s, 1),
    }
