"""The plain loop that the trainer is measured against: the structure of pytorch/examples' ImageNet.

One process a rank, NCHW in float32, SGD as torch makes it, the loss and the accuracies read to the
host every step, the loaders' workers started anew for every epoch and for every validation, and a
checkpoint that is written while the training waits.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchvision import transforms

from train.step import MEAN, STD

Mark = Callable[[str], None]  # called after every step with what it was: "train" or "val"


class Meter:
    """A running average of one figure."""

    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float, count: int) -> None:
        self.sum += value * count
        self.count += count


class ReferenceLoop:
    """A model and its training, written as pytorch/examples does it."""

    def __init__(
        self, arch: str, num_classes: int, lr: float = 0.1, distributed: bool = False
    ) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = getattr(torchvision.models, arch)(num_classes=num_classes)
        if distributed:
            self.model = DistributedDataParallel(self.model)
        self.criterion = nn.CrossEntropyLoss()
        parameters = self.model.parameters()
        self.optimizer = torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=1e-4)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=30, gamma=0.1)
        self.losses, self.top1, self.top5 = Meter(), Meter(), Meter()

    def step(self, images: torch.Tensor, target: torch.Tensor) -> None:
        """One step of training."""
        output = self.model(images)
        loss = self.criterion(output, target)
        self._count(output, target, loss)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the ranks do not exchange their gradients."""
        assert isinstance(self.model, DistributedDataParallel)
        return self.model.no_sync()

    def train_epoch(self, loader: Iterable[Any], mark: Mark) -> None:
        self.model.train()
        for images, target in loader:
            self.step(images, target)
            mark("train")

    @torch.no_grad()
    def validate(self, loader: Iterable[Any], mark: Mark) -> float:
        """The top-1 accuracy, in percent."""
        self.model.eval()
        self.top1 = Meter()
        for images, target in loader:
            output = self.model(images)
            self._count(output, target, self.criterion(output, target))
            mark("val")
        return self.top1.sum / self.top1.count

    def save(self, folder: Path, epoch: int, is_best: bool) -> None:
        """A checkpoint as pytorch/examples writes it."""
        state = {
            "epoch": epoch,
            "state_dict": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }
        torch.save(state, folder / "checkpoint.pth.tar")
        if is_best:
            shutil.copyfile(folder / "checkpoint.pth.tar", folder / "model_best.pth.tar")

    def _count(self, output: torch.Tensor, target: torch.Tensor, loss: torch.Tensor) -> None:
        acc1, acc5 = accuracy(output, target)
        self.losses.update(loss.item(), len(target))
        self.top1.update(acc1, len(target))
        self.top5.update(acc5, len(target))


@torch.no_grad()
def accuracy(output: torch.Tensor, target: torch.Tensor) -> tuple[float, float]:
    """(top-1, top-5) in percent, on the host."""
    correct = output.topk(5, 1).indices.t().eq(target.view(1, -1))
    top1, top5 = (correct[:k].float().sum().mul(100 / len(target)).item() for k in (1, 5))
    return top1, top5


def pil_steps(split: str, size: int) -> Any:
    """torchvision's transforms, from a Pillow image to normalised floats."""
    crop = (
        [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
        if split == "train"
        else [transforms.Resize(int(size * 256 / 224)), transforms.CenterCrop(size)]
    )
    return transforms.Compose([*crop, transforms.ToTensor(), transforms.Normalize(MEAN, STD)])


def make_loader(root: Path, split: str, size: int, batch: int, workers: int) -> DataLoader[Any]:
    """ImageFolder, Pillow and torchvision's transforms in worker processes."""
    images = torchvision.datasets.ImageFolder(str(root / split), pil_steps(split, size))
    is_train = split == "train"
    return DataLoader(
        images,
        batch,
        shuffle=is_train,
        num_workers=workers,
        drop_last=is_train,
        multiprocessing_context="fork",  # as where pytorch/examples runs; case_process spawns
    )


def run_epochs(
    loop: ReferenceLoop, loaders: dict[str, DataLoader[Any]], epochs: int, folder: Path, mark: Mark
) -> None:
    """Whole epochs: train, validate, move the rate, save."""
    best = -1.0
    for epoch in range(epochs):
        loop.train_epoch(loaders["train"], mark)
        acc1 = loop.validate(loaders["val"], mark)
        loop.scheduler.step()
        loop.save(folder, epoch, acc1 > best)
        best = max(best, acc1)
