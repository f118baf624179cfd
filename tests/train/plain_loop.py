"""A training loop that is not ours: plain PyTorch with a checkpoint a step, and a kill -9 in it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from tests.train.tiny_net import TinyNet
from train.torch_data import batches

EPOCHS, BATCH, SIZE = 2, 8, 32


def train(data: Path | str, folder: Path, kill_at: int, when: str) -> None:
    """Trains to the end; kills itself at a step, before or after it was saved."""
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    loader = batches(data, BATCH, image_size=SIZE, num_workers=2, data_dir=folder / "data")
    model: nn.Module = TinyNet(num_classes=40)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen: list[int] = []
    if (folder / "last.pt").exists():
        state = torch.load(folder / "last.pt")
        model.load_state_dict(state["model"])
        loader.load_state_dict(state["data"])
        seen = state["seen"]
    for _ in range(loader.epoch, EPOCHS):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images.float() / 255), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            average_gradients(model)
            optimizer.step()
            seen += gather(labels)
            die_if(when == "before" and len(seen) == kill_at * BATCH)
            if not dist.is_initialized() or dist.get_rank() == 0:
                state = {"model": model.state_dict(), "data": loader.state_dict(), "seen": seen}
                save(state, folder / "last.pt")
            die_if(when == "after" and len(seen) == kill_at * BATCH)
    loader.close()


def gather(labels: torch.Tensor) -> list[int]:
    """The labels of all ranks."""
    if not dist.is_initialized():
        return labels.tolist()
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, labels.tolist())
    return [label for share in shares for label in share]


def average_gradients(model: nn.Module) -> None:
    for parameter in model.parameters() if dist.is_initialized() else ():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def save(state: dict[str, Any], path: Path) -> None:
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def die_if(is_time: bool) -> None:
    if is_time:
        os.kill(os.getpid(), signal.SIGKILL)
