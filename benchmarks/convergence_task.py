"""The task of benchmarks/convergence.py: its images, its sets of classes, its orders, one run."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from benchmarks.bench import CACHE
from benchmarks.convergence_verdict import CONTROL, STREAMED, UNIFORM
from benchmarks.large_batch_task import build_net
from dataset.archive.index import find_or_build_index
from dataset.archive.index_file import TarIndex
from dataset.archive.units import cut_units
from dataset.fake.archives import VAL
from dataset.fake.draw import Item, open_drawer
from dataset.fake.make import make_fake_imagenet
from dataset.names import TRAIN_TAR
from train.data.decode import decode_val
from train.data.sampler import BatchPlan, Int64s, epoch_order, sample_uniforms
from train.data.sources import TarSource
from train.data.streamed_order import Layout, streamed_order
from train.optim import make_optimizer, set_lr, zero_init_last_gamma
from train.recipe import Recipe, lr_at, resolve_recipe

Pixels = npt.NDArray[np.uint8]
STORED_PX, IMAGE_PX = 36, 32  # a window of 32 pixels is taken from a stored image of 36
ORDERS = (UNIFORM, STREAMED, CONTROL)
NUM_LOOKS = 100


@dataclass(frozen=True)
class SetSpec:
    """How a set is made of the looks of the fake ImageNet.

    The looks of a class lie one after the other in the tar: one tar serves all sets, and each of
    them is grouped by class.
    """

    looks: tuple[int, ...]  # of each class
    grain: float = 0.0  # noise in the pixels, so that the set is not too easy to show a difference
    is_uneven: bool = False  # its rare classes scatter: it needs more pairs for the same interval


SETS = {
    "100 classes": SetSpec((1,) * 100, grain=75.0),
    "2 classes": SetSpec((50, 50)),
    "5 classes (90/5/3/1/1 %)": SetSpec((90, 5, 3, 1, 1), is_uneven=True),
}
# Five pairs of it left an interval that was wider than the margin, so it has the further seeds too.
# Not a field of a set: the runs that were trained before keep their task's digest.
UNDECIDED = ("2 classes",)


@dataclass(frozen=True)
class Task:
    """Everything that decides what is trained; chosen from the uniform order alone."""

    train_per_look: int = 200
    num_val: int = 10_000  # of each set, the same number of each class
    picture_size: tuple[int, int] = (48, 40)
    unit_size: int = 12 << 10  # bytes: four images, so that the window has two units of each look
    window_share: float = 0.04  # of the epoch
    widths: tuple[int, ...] = (12, 24, 48)
    epochs: int = 6
    batch_size: int = 50  # 16 of them are the window
    lr: float = 0.1
    warmup_epochs: float = 1.0
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    more_seeds: tuple[int, ...] = (5, 6, 7, 8, 9, 10, 11)  # of some sets, without the control

    @property
    def num_train(self) -> int:
        return NUM_LOOKS * self.train_per_look

    @property
    def window(self) -> int:
        return int(self.window_share * self.num_train)

    @property
    def recipe(self) -> Recipe:
        own = {"lr": self.lr, "warmup_epochs": self.warmup_epochs}
        return resolve_recipe("sgd", self.batch_size, self.epochs, own)

    @property
    def runs(self) -> list[tuple[str, str, int]]:
        """(set, order, seed) of every run; a seed of all sets first, so that pairs come early."""
        more = [name for name, spec in SETS.items() if spec.is_uneven or name in UNDECIDED]
        pair = (UNIFORM, STREAMED)
        return [
            *((name, order, seed) for seed in self.seeds for name in SETS for order in ORDERS),
            *((name, order, seed) for seed in self.more_seeds for name in more for order in pair),
        ]

    @property
    def digest(self) -> str:
        """Equal digests train the same; the recipe's values are part of it."""
        return hashlib.sha256(repr((self, self.recipe, SETS)).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class LabelledImages:
    """Images [n, STORED_PX, STORED_PX, 3] of uint8, and the class of each."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class ClassSet:
    """A set: its images, where they lie in the tar, and how many classes they have."""

    train: LabelledImages
    val: LabelledImages
    in_tar: Int64s  # the samples in the order of the tar
    layout: Layout
    num_classes: int


def make_sets(task: Task) -> dict[str, ClassSet]:
    """The sets, from one tar that is drawn once and kept."""
    width, height = task.picture_size
    folder = CACHE / f"convergence-{task.train_per_look}-{width}x{height}"
    make_fake_imagenet(
        folder,
        classes=NUM_LOOKS,
        train_per_class=task.train_per_look,
        val_per_class=0,  # drawn below: a set of 90/5/3/1/1 % needs as many of each class
        size=task.picture_size,
    )
    index = find_or_build_index(folder / TRAIN_TAR)
    source = TarSource(index)
    pixels = [decode_val(source.read(i), source.name(i), STORED_PX) for i in range(len(source))]
    images = np.stack(pixels)
    return {name: _make_set(task, spec, index, images) for name, spec in SETS.items()}


def _make_set(task: Task, spec: SetSpec, index: TarIndex, images: Pixels) -> ClassSet:
    labels = np.repeat(np.arange(len(spec.looks)), spec.looks)[index.label].astype(np.int64)
    units = cut_units(index.offset, index.size, labels, index.tar_size, task.unit_size)
    return ClassSet(
        LabelledImages(_add_grain(images, spec.grain, 0), torch.from_numpy(labels)),
        _draw_val(task, spec),
        np.argsort(index.offset, kind="stable").astype(np.int64),
        Layout(units.unit, units.group, index.tar_size),
        len(spec.looks),
    )


def _draw_val(task: Task, spec: SetSpec) -> LabelledImages:
    """Validation pictures, as many of each class, the looks of a class in turn."""
    looks, per_class = spec.looks, task.num_val // len(spec.looks)
    first = np.cumsum((0, *looks[:-1])).tolist()
    items = [
        Item("", 0, VAL, first[label] + i % looks[label], i // looks[label], task.picture_size)
        for label in range(len(looks))
        for i in range(per_class)
    ]
    with open_drawer(1 if task.num_val < 1000 else 2) as draw:
        pixels = [decode_val(picture.data, "", STORED_PX) for _, picture in draw(items)]
    labels = torch.arange(len(looks)).repeat_interleave(per_class)
    return LabelledImages(_add_grain(np.stack(pixels), spec.grain, 1), labels)


def _add_grain(images: Pixels, deviation: float, seed: int) -> Tensor:
    """The images with normal noise in every pixel, the same for every run."""
    if deviation == 0:
        return torch.from_numpy(images)
    rng, noisy = np.random.default_rng(seed), np.empty_like(images)
    for image, out in zip(images, noisy, strict=True):
        noise = rng.standard_normal(image.shape, dtype=np.float32) * np.float32(deviation)
        out[:] = np.clip(image + noise, 0, 255)
    return torch.from_numpy(noisy)


def shuffle_in_buffer(seed: int, epoch: int, in_tar: Int64s, size: int) -> Int64s:
    """The usual way to stream: a buffer is filled in file order and drawn from at random."""
    rng = np.random.default_rng([seed, epoch])
    buffer, order = in_tar[:size].copy(), np.empty_like(in_tar)
    places = rng.integers(size, size=len(in_tar) - size)
    for position, place in enumerate(places.tolist()):
        order[position] = buffer[place]
        buffer[place] = in_tar[size + position]
    order[len(places) :] = rng.permutation(buffer)
    return order


def make_order(order: str, seed: int, data: ClassSet, window: int) -> Callable[[int], Int64s]:
    """The samples of an epoch, in an order by name."""
    makers: dict[str, Callable[[int], Int64s]] = {
        UNIFORM: lambda epoch: epoch_order(seed, epoch, len(data.in_tar)),
        STREAMED: lambda epoch: streamed_order(seed, epoch, data.layout, window),
        CONTROL: lambda epoch: shuffle_in_buffer(seed, epoch, data.in_tar, window),
    }
    return makers[order]


def augment(images: Tensor, seed: int, epoch: int, samples: Int64s) -> Tensor:
    """A random window and flip of each image, by (seed, epoch, sample): the same in any order."""
    uniforms = sample_uniforms(seed, epoch, samples, 3)
    corner = (uniforms[:, :2] * (STORED_PX - IMAGE_PX + 1)).astype(np.int64)
    across = np.arange(IMAGE_PX)
    columns = np.where(uniforms[:, 2:] < 0.5, across[::-1], across) + corner[:, 1:]
    rows = torch.from_numpy(across + corner[:, :1])[:, :, None]
    picked = torch.from_numpy(samples)[:, None, None]
    return _normalise(images[picked, rows, torch.from_numpy(columns)[:, None, :]])


def _normalise(images: Tensor) -> Tensor:
    """[n, 3, h, w] in channels_last, from uint8 [n, h, w, 3]."""
    return images.permute(0, 3, 1, 2).float().sub_(128.0).div_(64.0)


@torch.no_grad()
def measure_classes(net: nn.Module, val: LabelledImages, num_classes: int) -> Tensor:
    """The share of each class's validation images that is named right, in per cent."""
    edge = (STORED_PX - IMAGE_PX) // 2
    net.eval()
    parts = torch.split(val.images[:, edge:-edge, edge:-edge], 500)
    is_right = torch.cat([net(_normalise(part)).argmax(1) for part in parts]) == val.labels
    net.train()
    right = torch.bincount(val.labels[is_right], minlength=num_classes)
    return 100 * right / torch.bincount(val.labels, minlength=num_classes)


def train_run(task: Task, data: ClassSet, order: str, seed: int) -> dict[str, Any]:
    """One run's accuracies; runs of one seed differ in their order alone."""
    start_s = time.monotonic()
    torch.manual_seed(seed)
    net = build_net(task.widths, data.num_classes)
    zero_init_last_gamma(net)
    optimizer = make_optimizer(net, task.recipe)
    make_epoch = make_order(order, seed, data, task.window)
    # The top-1 of images distributed as in training, from as many images of each class.
    shares = torch.bincount(data.train.labels) / len(data.train.labels)
    curve: list[float] = []
    for epoch in range(task.epochs):
        _train_epoch(task, data, net, optimizer, seed, epoch, make_epoch(epoch))
        of_classes = measure_classes(net, data.val, data.num_classes)
        curve.append(round(float((of_classes * shares).sum()), 3))
    return {
        "acc1_pct": curve,
        "class_mean_pct": round(float(of_classes.mean()), 3),
        "seconds": round(time.monotonic() - start_s, 1),
    }


def _train_epoch(
    task: Task,
    data: ClassSet,
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    seed: int,
    epoch: int,
    samples: Int64s,
) -> None:
    plan = BatchPlan(len(samples), task.batch_size, task.batch_size, 0, 1)
    recipe, steps = task.recipe, plan.steps_per_epoch
    for number in range(steps):
        batch = plan.select(samples, number, 0)
        output = net(augment(data.train.images, seed, epoch, batch))
        loss = nn.functional.cross_entropy(
            output, data.train.labels[batch], label_smoothing=recipe.label_smoothing
        )
        net.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        set_lr(optimizer, lr_at(recipe, epoch * steps + number, steps, steps * task.epochs))
        optimizer.step()
