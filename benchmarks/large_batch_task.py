"""The frozen task of benchmarks/large_batch.py: its images, its net, its plans, one run of it."""

from __future__ import annotations

import hashlib
import io
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

from dataset.fake.picture import draw_picture
from train.optim import make_optimizer, set_lr, zero_init_last_gamma
from train.recipe import Recipe, lr_at, resolve_recipe

STORED_PX, IMAGE_PX = 36, 32  # windows of 32 pixels are taken from stored images of 36


@dataclass(frozen=True)
class Task:
    """The frozen task, chosen from the small-batch reference alone (docs/recipes.md)."""

    num_classes: int = 256
    train_per_class: int = 32
    val_per_class: int = 8
    widths: tuple[int, ...] = (8, 16, 32)
    passes: int = 50  # over the training images; the schedules' 90 epochs are spread over them
    epochs: int = 90
    small_batch: int = 32  # also the batch-norm group of every run
    imagenet_batch: int = 256  # the batch on ImageNet that small_batch stands for
    base_lr: float = 0.1  # of the small batch
    eval_passes: int = 5

    @property
    def num_train(self) -> int:
        return self.num_classes * self.train_per_class


@dataclass(frozen=True)
class TrainingPlan:
    """One row of the table: a way to train at a multiple of the small batch."""

    name: str
    times: int
    recipe: Recipe


@dataclass(frozen=True)
class Data:
    """Normalised images [n, 3, STORED_PX, STORED_PX] and their labels."""

    train_images: Tensor
    train_labels: Tensor
    val_images: Tensor
    val_labels: Tensor


def make_plans(task: Task) -> dict[str, TrainingPlan]:
    """The rows in their order: the reference's rates grow from the task's, ours are the table's."""

    def plan(name: str, times: int, recipe: str, lr: float | None = None) -> TrainingPlan:
        batch_size = task.imagenet_batch * times
        return TrainingPlan(
            name, times, resolve_recipe(recipe, batch_size, task.epochs, {"lr": lr})
        )

    plans = [plan("small batch", 1, "reference", task.base_lr)]
    for times in (16, 64):
        plans += [
            plan(f"reference, LR left, {times}x", times, "reference", task.base_lr),
            plan(f"reference, LR scaled, {times}x", times, "reference", task.base_lr * times),
            plan(f"ours (auto: lars), {times}x", times, "auto"),
            plan(f"ours (sgd), {times}x", times, "sgd"),
        ]
    return {p.name: p for p in plans}


def draw_images(task: Task, split: int, per_class: int) -> tuple[Tensor, Tensor]:
    """The pictures of one split of the fake ImageNet, decoded once, and their labels."""
    images = []
    for label in range(task.num_classes):
        for number in range(per_class):
            picture = draw_picture(0, split, label, number, (80, 60))
            image = Image.open(io.BytesIO(picture.data)).convert("RGB")
            side = min(image.size)
            left, top = (image.width - side) // 2, (image.height - side) // 2
            box = (left, top, left + side, top + side)
            image = image.resize((STORED_PX, STORED_PX), Image.Resampling.BILINEAR, box)
            images.append(np.asarray(image))
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    labels = torch.arange(task.num_classes).repeat_interleave(per_class)
    return pixels.float().sub_(128.0).div_(64.0), labels


def build_net(widths: Sequence[int], num_classes: int) -> nn.Module:
    """A narrow ResNet: a stem of stride 2, one basic block a width, torchvision's first weights."""
    channels = widths[0]
    layers: list[nn.Module] = [
        nn.Conv2d(3, channels, 3, 2, 1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
    ]
    for width in widths:
        stride, shortcut = 1, None
        if width != channels:
            stride = 2
            shortcut = nn.Sequential(
                nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )
        layers.append(BasicBlock(channels, width, stride, shortcut))
        channels = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)]
    net = nn.Sequential(*layers)
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return net.to(memory_format=torch.channels_last)


def augment(images: Tensor, rng: torch.Generator) -> Tensor:
    """A random window and flip, the same for the 32 images of a microbatch: cheap on a CPU."""
    top, left = torch.randint(0, STORED_PX - IMAGE_PX + 1, (2,), generator=rng).tolist()
    images = images[:, :, top : top + IMAGE_PX, left : left + IMAGE_PX]
    if torch.rand((), generator=rng) < 0.5:
        images = images.flip(3)
    return images.contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def measure_accuracy(net: nn.Module, data: Data) -> float:
    """Top-1 in per cent on the centre windows of the validation images."""
    edge = (STORED_PX - IMAGE_PX) // 2
    images = data.val_images[:, :, edge : edge + IMAGE_PX, edge : edge + IMAGE_PX]
    net.eval()
    parts = zip(torch.split(images, 256), torch.split(data.val_labels, 256), strict=True)
    correct = sum(int((net(part).argmax(1) == truth).sum()) for part, truth in parts)
    net.train()
    return 100 * correct / len(images)


def accumulate(
    net: nn.Module, parts: Sequence[Tensor], data: Data, smoothing: float, rng: torch.Generator
) -> float:
    """The mean loss of one optimiser step over its microbatches; the gradient stays in the net."""
    net.zero_grad(set_to_none=True)
    total = 0.0
    for part in parts:
        output = net(augment(data.train_images[part], rng))
        loss = nn.functional.cross_entropy(
            output, data.train_labels[part], label_smoothing=smoothing
        )
        torch.autograd.backward(loss / len(parts))
        total += loss.item()
    return total / len(parts)


def train_run(task: Task, plan: TrainingPlan, seed: int, data: Data) -> Iterator[dict[str, Any]]:
    """Trains one run; yields a row of its curve at each evaluation."""
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    net, recipe = build_net(task.widths, task.num_classes), plan.recipe
    if recipe.zero_init_gamma:
        zero_init_last_gamma(net)
    optimizer = make_optimizer(net, recipe)
    batch_size = task.small_batch * plan.times
    steps_per_pass = task.num_train // batch_size
    total_steps, step = steps_per_pass * task.passes, 0
    for number in range(1, task.passes + 1):
        order, losses = torch.randperm(task.num_train, generator=rng), []
        for batch in torch.split(order, batch_size)[:steps_per_pass]:
            parts = torch.split(batch, task.small_batch)
            losses.append(accumulate(net, parts, data, recipe.label_smoothing, rng))
            set_lr(optimizer, lr_at(recipe, step, total_steps / task.epochs, total_steps))
            optimizer.step()
            step += 1
        loss, is_finite = statistics.fmean(losses), math.isfinite(statistics.fmean(losses))
        if number % task.eval_passes == 0 or not is_finite:
            acc1_pct = round(measure_accuracy(net, data), 3)
            yield {"pass": number, "step": step, "loss": round(loss, 4), "acc1_pct": acc1_pct}
        if not is_finite:
            return  # diverged: its last accuracy stands


def fingerprint(task: Task, plan: TrainingPlan) -> str:
    """What a recorded run must share with the code to be counted: the task and the recipe."""
    recipe = {name: value for name, value in vars(plan.recipe).items() if name != "notes"}
    return hashlib.sha256(repr((task, plan.times, recipe)).encode()).hexdigest()[:10]
