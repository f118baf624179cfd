"""NCCL's last error: torch aborts a process whose NCCL fails, and does not always say why."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_HOOK_ID = 0x7261696E  # ours among the hooks of the backend


def last_error() -> str:
    """NCCL's last error message in this process; empty if NCCL is not loaded as a library."""
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        library.ncclGetLastError.restype = ctypes.c_char_p
        said: bytes | None = library.ncclGetLastError(None)
    except (OSError, AttributeError):
        return ""
    return (said or b"").decode(errors="replace").strip()


def call_before_abort(device: torch.device, action: Callable[[RuntimeError], object]) -> None:
    """Calls action when NCCL's watching thread is about to abort the process (torch >= 2.15).

    Without this a run would end with signal 6, and its record would still say "running".
    """
    group: Any = dist.group.WORLD
    if group is None:  # one rank
        return
    backend = group._get_backend(device)
    if getattr(backend, "supports_abort_hooks", False):
        backend.register_abort_hook(_HOOK_ID, lambda: action(_find_reason(device)))


def _find_reason(device: torch.device) -> RuntimeError:
    """Why the process is about to be aborted: a GPU that fails, or else NCCL."""
    try:
        torch.cuda.current_stream(device).query()
    except RuntimeError as error:
        return error
    return RuntimeError(f"NCCL ends this process: {last_error() or 'its log above says why'}")
