"""Calls whose form depends on the version of torch: 2.1, the floor, to the pinned one."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def make_scaler(device_type: str, enabled: bool) -> Any:
    """The gradient scaler of fp16; torch.amp has one since 2.3."""
    if hasattr(torch.amp, "GradScaler"):
        return torch.amp.GradScaler(device_type, enabled=enabled)
    return torch.cuda.amp.GradScaler(enabled=enabled)  # type: ignore[no-untyped-call,unused-ignore]


def wrap_ddp(model: nn.Module, device: torch.device) -> DistributedDataParallel:
    """The model under DDP. Its buffers are ours (train/norm.py), so DDP leaves them alone."""
    with warnings.catch_warnings():
        # 2.15 warns that broadcast_buffers gets another name, which 2.1 does not know.
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
        )


def compile_model(model: nn.Module) -> nn.Module:
    compiled: nn.Module = torch.compile(model)  # type: ignore[assignment,unused-ignore]
    return compiled
