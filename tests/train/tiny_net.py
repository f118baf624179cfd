"""A network of two convolutions for tests in which any network does: `-a tinynet`.

A step of ShuffleNet, the smallest of torchvision with batch norm, is 170 small operations; this one
is 12, with the names that tests reach for (conv1.0, conv1.1, fc). It is known in processes that
import this file alone: the ranks of tests/train/started_ranks.py, not `python -m train`.
"""

from __future__ import annotations

import torch
from torch import nn
from torchvision.models._api import register_model

NAME = "tinynet"
WIDTH = 16  # features before the last layer


class TinyNet(nn.Module):
    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.conv2 = nn.Sequential(
            nn.Conv2d(8, WIDTH, 3, stride=2, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU()
        )
        self.fc = nn.Linear(WIDTH, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.conv2(self.conv1(images)).mean((2, 3))
        return torch.as_tensor(self.fc(features))


def tinynet(*, weights: object = None, progress: bool = True, num_classes: int = 1000) -> TinyNet:
    """The network, made as torchvision's builders make theirs."""
    return TinyNet(num_classes)


tinynet.__module__ = "torchvision.models.tinynet"  # the trainer asks torchvision for its own only
register_model(NAME)(tinynet)
