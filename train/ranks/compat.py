"""Calls whose form depends on the version of torch: 2.1, the floor, to the pinned one."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def make_scaler(device_type: str, enabled: bool) -> Any:
    """The gradient scaler of fp16; torch.amp has one since 2.3."""
    if hasattr(torch.amp, "GradScaler"):
        return torch.amp.GradScaler(device_type, enabled=enabled)
    return torch.cuda.amp.GradScaler(enabled=enabled)  # type: ignore[no-untyped-call,unused-ignore]


def wrap_ddp(model: nn.Module, device: torch.device) -> DistributedDataParallel:
    """The model under DDP, which leaves its buffers to train/network/batch_norm.py."""
    with warnings.catch_warnings():
        # 2.15 warns that broadcast_buffers gets another name, which 2.1 does not know.
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
        )


def init_process_group(device: torch.device, **options: Any) -> None:
    """The process group of all ranks: NCCL on GPUs, else gloo.

    NCCL is told the device (possible since 2.3): 2.15 takes LOCAL_RANK's, else that of the global
    rank, whatever set_device said; older ones take the device of the tensors.
    """
    is_gpu = device.type == "cuda"
    if is_gpu and "device_id" in inspect.signature(dist.init_process_group).parameters:
        options["device_id"] = device
    dist.init_process_group("nccl" if is_gpu else "gloo", **options)


def compile_model(model: nn.Module) -> nn.Module:
    compiled: nn.Module = torch.compile(model)  # type: ignore[assignment,unused-ignore]
    return compiled


def has_keys(store: Any, keys: Sequence[str]) -> bool:
    """Whether a store holds all keys, without waiting; Store.check came after 2.1."""
    if hasattr(store, "check"):
        return bool(store.check(list(keys)))
    # For a missing key compare_set returns the expected value, and does not create it.
    return all(store.compare_set(key, _NO_VALUE, _NO_VALUE) != _NO_VALUE.encode() for key in keys)


_NO_VALUE = "(no such key)"  # no rank writes that
