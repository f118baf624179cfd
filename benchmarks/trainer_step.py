"""The trainer's real step, ready to run on one batch that lies in memory, for the benchmarks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
import torchvision

from train.data.batches import Batch
from train.data.sampler import BatchPlan
from train.device import prefers_channels_last
from train.ranks.comm import Comm
from train.ranks.interrupt import Vote
from train.recipe import resolve_recipe
from train.records.phases import PhaseClock
from train.step import Placement, Trainer

NUM_CLASSES = 1000
CPU = torch.device("cpu")


def make_pixels(batch: int, size: int) -> torch.Tensor:
    """Images as the loader hands them over: uint8, channels last in memory."""
    generator = torch.Generator().manual_seed(0)
    shape = (batch, size, size, 3)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return pixels.permute(0, 3, 1, 2)


def normalise_for_reference(pixels: torch.Tensor) -> torch.Tensor:
    """The same images as pytorch/examples' loader hands them over: float, NCHW, normalised."""
    return Placement(CPU, "fp32", channels_last=False).normalise(pixels)


def make_labels(batch: int) -> torch.Tensor:
    return torch.randint(0, NUM_CLASSES, (batch,), generator=torch.Generator().manual_seed(1))


def make_trainer(
    arch: str,
    size: int,
    batch_per_rank: int,
    comm: Comm,
    *,
    channels_last: bool | None = None,
    use_compile: bool = False,
) -> Trainer:
    """A trainer as `python -m train` builds it; channels_last None: its own choice."""
    if channels_last is None:
        channels_last = prefers_channels_last(CPU, "fp32", size)
    torch.manual_seed(0)
    model = getattr(torchvision.models, arch)(num_classes=NUM_CLASSES)
    batch = batch_per_rank * comm.world_size
    return Trainer(
        model,
        Placement(CPU, "fp32", channels_last),
        resolve_recipe("reference", batch, 90, {"lr": 0.1 * batch / 256}),
        BatchPlan(1_281_167, batch, batch_per_rank, comm.rank, comm.world_size),
        comm,
        seed=0,
        schedule_steps=100_000,
        ema_decay=0.0,
        use_compile=use_compile,
    )


def make_step(
    trainer: Trainer, size: int, agree: Callable[[float], Vote] = lambda _: Vote.GO_ON
) -> Callable[[], None]:
    """A function that runs one optimiser step on the same batch."""
    batch = trainer.plan.microbatch
    images, labels = make_pixels(batch, size), make_labels(batch)
    batches: Iterator[Batch] = itertools.repeat(Batch(images, labels, [], ""))
    clock = PhaseClock(0.0)

    def step() -> None:
        trainer.run_step(batches, clock, agree)

    return step
