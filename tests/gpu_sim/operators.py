"""Computes the operators on CUDA tensors with the CPU's kernels, on the same memory.

The tensors are torch's own CUDA tensors: its allocator, streams, events, autograd threads, DDP and
ProcessGroupNCCL run for real; only the kernels are replaced. CUDASIM_MODE=shape allocates the
results and computes nothing: memory and launches of a network of any size, in seconds.
"""

from __future__ import annotations

import collections
import ctypes
import os
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

aten = torch.ops.aten
runtime = ctypes.CDLL("libcudart.so.13")
runtime.cudasim_stream_block.argtypes = [ctypes.c_void_p]
runtime.cudasim_stream_pending.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
runtime.cudasim_count.restype = ctypes.c_long
COUNTERS = (
    *("malloc", "host_alloc", "copy_on_device", "copy_pinned", "copy_pageable", "sync_copy"),
    *("sync_stream", "sync_event", "sync_device", "stray_launch"),
)
IN_PLACE = re.compile(r"_(fused|foreach|amp_foreach)\w*_")
HALF = (torch.float16, torch.bfloat16)
# Operators that launch nothing: torch's own code for CUDA does them.
NATIVE = {
    *("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach", "alias"),
    *("record_stream", "is_pinned", "_pin_memory", "pin_memory", "set_", "resize_", "lift_fresh"),
    *("_resize_output_", "is_same_size", "_has_compatible_shallow_copy_type", "requires_grad_"),
}

# What was done so far, each with the lines of ours that asked for it.
launches: collections.Counter[str] = collections.Counter()
syncs: collections.Counter[str] = collections.Counter()
copies: collections.Counter[str] = collections.Counter()


def counters() -> dict[str, int]:
    """What the runtime was asked for so far."""
    return {name: runtime.cudasim_count(i) for i, name in enumerate(COUNTERS)}


def install() -> None:
    """Simulates the operators of this thread, and of those that torch starts for it."""
    mode = SimulatedCuda(computes=os.environ.get("CUDASIM_MODE", "compute") == "compute")
    mode.__enter__()  # type: ignore[no-untyped-call]
    plain = torch.cuda.synchronize

    def synchronize(device: Any = None) -> None:
        syncs[f"torch.cuda.synchronize {_where()}"] += 1
        plain(device)

    torch.cuda.synchronize = synchronize


FEW = 8


class SimulatedCuda(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes every operator that has to do with a CUDA tensor."""

    def __init__(self, computes: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.computes = computes
        # As on a GPU, the host runs ahead until so many launches are queued (shape mode only).
        self.queue_length = int(os.environ.get("CUDASIM_QUEUE", "0"))
        self.num_queued = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat, _ = tree_flatten((args, kwargs))
        tensors = [x for x in flat if isinstance(x, torch.Tensor)]
        devices = [x.device for x in tensors] + [x for x in flat if isinstance(x, torch.device)]
        device = next((d for d in devices if d.type == "cuda"), None)
        name = func._schema.name.removeprefix("aten::")
        is_native = name in NATIVE or func.is_view or func.namespace == "c10d"
        if device is None or is_native:
            return func(*args, **kwargs)
        if name == "_to_copy":
            return self.to_copy(*args, **kwargs)
        if name == "copy_":
            return self.copy_(*args, **kwargs)
        stream = torch._C._cuda_getCurrentRawStream(device.index or 0)
        if name in ("_local_scalar_dense", "item"):
            syncs[_where()] += 1
            runtime.cudasim_stream_block(stream)
            return func(_on_host(args[0]))
        if name in ("is_nonzero", "equal"):
            syncs[_where()] += 1
        _refuse_mixed(name, tensors)
        _refuse_without_kernels(device)
        launches[name] += 1
        self.wait_for_stream(stream)
        return self.run(func, name, args, kwargs, device)

    def wait_for_stream(self, stream: int) -> None:
        """A kernel waits for its stream; the host only where the queue of launches is full."""
        if self.queue_length and not self.computes:
            is_busy = runtime.cudasim_stream_pending(stream, (ctypes.c_void_p * 1)(), 1)
            self.num_queued = self.num_queued + 1 if is_busy else 0
            if self.num_queued < self.queue_length:
                return
        runtime.cudasim_stream_block(stream)

    # --- copies --------------------------------------------------------------------------------

    def to_copy(
        self,
        x: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        layout: Any = None,
        device: torch.device | None = None,
        pin_memory: bool | None = None,
        non_blocking: bool = False,
        memory_format: Any = None,
    ) -> torch.Tensor:
        """x.to(...): a new tensor of the layout that torch would choose, and a copy into it."""
        meta = torch.empty_strided(x.size(), x.stride(), dtype=dtype or x.dtype, device="meta")
        like = torch.empty_like(meta, memory_format=memory_format or torch.preserve_format)
        out = torch.empty_strided(
            like.size(),
            like.stride(),
            dtype=like.dtype,
            device=device or x.device,
            pin_memory=bool(pin_memory),
        )
        return self.copy_(out, x, non_blocking)

    def copy_(self, to: torch.Tensor, x: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """to.copy_(x); between host and device by cudaMemcpyAsync where the bytes agree."""
        device = to.device if to.is_cuda else x.device
        stream = torch._C._cuda_getCurrentRawStream(device.index or 0)
        if to.is_cuda and x.is_cuda:
            _refuse_without_kernels(device)
            launches["copy_"] += 1
            self.wait_for_stream(stream)
        else:
            _count_copy(to, x, non_blocking)
            if to.numel() and _has_same_bytes(to, x):
                done: torch.Tensor = aten.copy_(to, x, non_blocking)
                return done
            runtime.cudasim_stream_block(stream)
        if self.computes or not (to.is_cuda and x.is_cuda):
            _on_host(to).copy_(_on_host(x))
        return to

    # --- kernels -------------------------------------------------------------------------------

    def run(self, func: Any, name: str, args: Any, kwargs: Any, device: torch.device) -> Any:
        """The operator on the host's view of its tensors; results are new tensors of the device."""
        # A few numbers, and new tensors, are always computed: the trainer asks whether a GPU adds.
        sizes = [x.numel() for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        computes = self.computes or sum(sizes) <= FEW
        if not computes and IN_PLACE.fullmatch(name):
            return None  # nothing is allocated
        originals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def lower(x: Any) -> Any:
            if isinstance(x, torch.Tensor) and (x.is_cuda or not computes):
                y = _on_host(x) if computes else _as_meta(x)
                originals[id(y)] = (y, x)
                return y
            if isinstance(x, torch.device) and x.type == "cuda":
                return torch.device("cpu" if computes else "meta")
            return x

        def lift(y: Any) -> Any:
            if not isinstance(y, torch.Tensor):
                return y
            if id(y) in originals:
                return originals[id(y)][1]
            x = torch.empty_strided(y.size(), y.stride(), dtype=y.dtype, device=device)
            if computes and y.numel():
                _on_host(x).copy_(y)
            return x

        args, kwargs = tree_map(lower, (args, kwargs))
        kwargs.pop("pin_memory", None)
        special = SPECIAL.get(name)
        return tree_map(lift, special(func, *args, **kwargs) if special else func(*args, **kwargs))


def _on_host(x: torch.Tensor) -> torch.Tensor:
    """The memory of a CUDA tensor as a CPU tensor; a CPU tensor as it is."""
    if not x.is_cuda:
        return x
    num_bytes = x.untyped_storage().nbytes()
    if num_bytes == 0 or x.numel() == 0:
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype)
    buffer = (ctypes.c_char * num_bytes).from_address(x.untyped_storage().data_ptr())
    storage = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    out = torch.empty(0, dtype=x.dtype)
    return out.set_(storage, x.storage_offset(), x.size(), x.stride())


def _as_meta(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")


def _has_same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    dense = a.is_contiguous() or a.is_contiguous(memory_format=torch.channels_last)
    return a.dtype == b.dtype and a.stride() == b.stride() and dense


def _count_copy(to: torch.Tensor, x: torch.Tensor, non_blocking: bool) -> None:
    """Notes a copy between host and device, and whether the host waits for it."""
    kind, host = ("to device", x) if to.is_cuda else ("to host", to)
    is_pinned = host.is_pinned()
    waits = not (non_blocking and is_pinned)
    memory, how = "pinned" if is_pinned else "pageable", "waits" if waits else "later"
    copies[f"{kind}, {memory}, {how} {_where()}"] += 1
    if waits and not (to.is_cuda and to.numel() == 1):  # a scalar goes along with its kernel
        syncs[f"copy {kind} {_where()}"] += 1


def _refuse_mixed(name: str, tensors: list[torch.Tensor]) -> None:
    """What CUDA refuses too; a scalar of the host may take part, and index into a device tensor."""
    strays = [x for x in tensors if not x.is_cuda and x.dim() > 0]
    if strays and not name.startswith(("index", "_index")):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda "
            f"and cpu! ({name} at {_where()})"
        )


def _refuse_without_kernels(device: torch.device) -> None:
    """Fails as a GPU does for which this build of torch has no kernels."""
    major, minor = torch.cuda.get_device_capability(device)
    for arch in torch.cuda.get_arch_list():
        kind, _, number = arch.rstrip("af").partition("_")
        arch_major, arch_minor = divmod(int(number), 10)
        if kind == "sm" and major == arch_major and minor >= arch_minor:
            return
        if kind == "compute" and (major, minor) >= (arch_major, arch_minor):
            return
    error = getattr(torch, "AcceleratorError", RuntimeError)
    raise error("CUDA error: no kernel image is available for execution on the device")


def _where() -> str:
    """The two innermost lines of the trainer."""
    lines = [
        f"{Path(frame.filename).name}:{frame.lineno}"
        for frame in reversed(traceback.extract_stack(limit=60))
        if "/train/" in frame.filename
    ]
    return f"at {' < '.join(lines[:2])}"


# --- operators of which the CPU has none, or another ---------------------------------------------


def _batch_norm(func: Any, x: Any, weight: Any, bias: Any, mean: Any, var: Any, *rest: Any) -> Any:
    out, save_mean, save_invstd = aten.native_batch_norm(x, weight, bias, mean, var, *rest)
    reserve = torch.empty(0, dtype=torch.uint8, device=x.device)
    return _like_layout(out, x), save_mean, save_invstd, reserve


def _batch_norm_backward(func: Any, x: Any, grad: Any, *rest: Any) -> Any:
    weight, mean, var, save_mean, save_invstd, eps, _ = rest
    values = (grad, x, weight, mean, var, save_mean, save_invstd, True, eps, [True] * 3)
    grad_x, grad_weight, grad_bias = aten.native_batch_norm_backward(*values)
    return _like_layout(grad_x, x), grad_weight, grad_bias


def _like_layout(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    is_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return out.contiguous(memory_format=torch.channels_last) if is_last else out


def _in_fp32(func: Any, *args: Any, **kwargs: Any) -> Any:
    """16-bit convolutions and products: computed in fp32, stored in 16 bits."""
    flat, _ = tree_flatten((args, kwargs))
    tensors = [x for x in flat if isinstance(x, torch.Tensor)]
    half = next((x.dtype for x in tensors if x.dtype in HALF), None)
    if half is None or tensors[0].is_meta:
        return func(*args, **kwargs)

    def change(source: tuple[torch.dtype, ...], dtype: torch.dtype) -> Callable[[Any], Any]:
        return lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype in source else x

    args, kwargs = tree_map(change(HALF, torch.float32), (args, kwargs))
    return tree_map(change((torch.float32,), half), func(*args, **kwargs))


SPECIAL: dict[str, Callable[..., Any]] = {
    "cudnn_batch_norm": _batch_norm,
    "cudnn_batch_norm_backward": _batch_norm_backward,
    **dict.fromkeys(("convolution", "convolution_backward", "mm", "addmm"), _in_fp32),
}
