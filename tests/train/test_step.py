"""One optimiser step: what an overflow leaves alone, and what a checkpoint gives back."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from dataset.errors import UserError
from train.data.batches import Batch
from train.data.sampler import BatchPlan
from train.ranks.comm import Comm
from train.ranks.interrupt import Vote
from train.ranks.launch import Launch
from train.recipe import resolve_recipe
from train.records.phases import PhaseClock
from train.step import Placement, Trainer

NUM_CLASSES, BATCH, MICROBATCH = 5, 8, 4
ALONE = Comm(Launch("single", "a test"))
CPU = Placement(torch.device("cpu"), "fp32")


def make_trainer(recipe: str, ema_decay: float = 0.9, num_classes: int = NUM_CLASSES) -> Trainer:
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 4, 3, bias=False)
    model = nn.Sequential(
        convolution, nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, num_classes)
    )
    values = resolve_recipe(recipe, 4096, 90, {"lr": 0.5, "warmup_epochs": 5.0})
    plan = BatchPlan(10 * BATCH, BATCH, MICROBATCH, 0, 1)
    options: dict[str, Any] = {"seed": 0, "schedule_steps": 900, "use_compile": False}
    return Trainer(model, CPU, values, plan, ALONE, ema_decay=ema_decay, **options)


def make_scaled_trainer(recipe: str) -> Trainer:
    """One with the scaler that fp16 has on a GPU; its arithmetic is the same on a CPU."""
    trainer = make_trainer(recipe)
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000)
    return trainer


def run_step(trainer: Trainer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(BATCH // MICROBATCH):
        images = torch.randint(256, (MICROBATCH, 3, 8, 8), generator=generator).to(torch.uint8)
        labels = torch.randint(NUM_CLASSES, (MICROBATCH,), generator=generator)
        batches.append(Batch(images, labels, [], ""))
    trainer.run_step(iter(batches), PhaseClock(time.monotonic()), lambda _: Vote.GO_ON)


def run_overflowing_step(trainer: Trainer, seed: int) -> None:
    """A step in which one element of one gradient is too large for its format."""

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[3] = math.inf
        return gradient

    *_, last = trainer.model.parameters()
    hook = last.register_hook(spoil)  # type: ignore[no-untyped-call]
    run_step(trainer, seed)
    hook.remove()


def snapshot(trainer: Trainer) -> dict[str, Any]:
    state = trainer.state()
    moved = {name: state[name] for name in ("optimizer", "ema")}
    weights = dict(trainer.model.named_parameters())
    return copy.deepcopy(moved | {"weights": {k: v.detach() for k, v in weights.items()}})


def assert_equal(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.fixture
def _nan_in_new_memory() -> Iterator[None]:
    """torch.empty is filled with NaN: what is used without having been written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_nan_in_new_memory")
@pytest.mark.parametrize("recipe", ["reference", "sgd", "lars"])
@pytest.mark.parametrize("num_before", [0, 2])
def test_a_step_that_overflows_moves_the_schedule_and_nothing_else(
    recipe: str, num_before: int
) -> None:
    """Next to a twin without the bad step, whose schedule is put on by hand."""
    trainer, twin = make_scaled_trainer(recipe), make_scaled_trainer(recipe)
    for seed in range(num_before):
        run_step(trainer, seed)
        run_step(twin, seed)
    before, rate = snapshot(trainer), trainer.lr
    run_overflowing_step(trainer, 77)
    assert trainer.step == num_before + 1
    assert trainer.lr != rate
    assert trainer.scaler.get_scale() == 2.0**7
    after = snapshot(trainer)
    assert_equal(after["weights"], before["weights"])
    assert_equal(after["ema"], before["ema"])
    twin.step += 1
    for seed in (5, 6):
        run_step(trainer, seed)
        run_step(twin, seed)
        assert_equal(snapshot(trainer), snapshot(twin))
    assert trainer.step == num_before + 3
    moved = snapshot(trainer)
    for kind in ("weights", "ema"):
        for name, tensor in moved[kind].items():
            assert tensor.isfinite().all() and not torch.equal(tensor, before[kind][name]), name


def test_a_scaled_step_is_the_plain_one() -> None:
    scaled, plain = make_scaled_trainer("sgd"), make_trainer("sgd")
    for seed in range(3):
        run_step(scaled, seed)
        run_step(plain, seed)
    assert_equal(snapshot(scaled), snapshot(plain))


def test_the_weights_of_another_recipes_checkpoint_are_taken_without_its_optimiser() -> None:
    trained = make_trainer("reference")
    run_step(trained, 0)
    state = copy.deepcopy(trained.state())
    with pytest.raises(UserError, match="of another optimiser"):
        make_trainer("sgd").load(state)
    taken = make_trainer("sgd")
    taken.load_weights(state)
    assert_equal(taken.state()["model"], state["model"])
    assert_equal(taken.state()["ema"], state["ema"])
    with pytest.raises(UserError, match="another arch or number of classes"):
        make_trainer("sgd", num_classes=3).load_weights(state)
