"""What happens to a rank on a simulated GPU: hooks, as those of tests/train/hooks.py."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from tests.train.hooks import own_rank

ECC_ERROR = 214  # cudaErrorECCUncorrectable
LAUNCH_FAILURE = 719  # cudaErrorLaunchFailure
NCCL_SYSTEM_ERROR, NCCL_REMOTE_ERROR = 2, 6


def at_step(rank: int, step: int, action: Callable[[], None]) -> None:
    """Does something in one rank when a global step begins."""
    from train.step import Trainer

    plain = Trainer.run_step

    def run_step(trainer: Trainer, *args: Any) -> Any:
        if trainer.step == step and own_rank() == rank:
            action()
        return plain(trainer, *args)

    Trainer.run_step = run_step  # type: ignore[method-assign,assignment]


def break_gpu(error: int = ECC_ERROR) -> None:
    """From now on every call of CUDA fails, as after an uncorrectable error."""
    ctypes.CDLL("libcudart.so.13").cudasim_break(error)


def break_gpu_for_kernels(error: int) -> None:
    """From the first kernel on every call of CUDA fails: the device is seen, no more."""
    import torch

    plain = torch.cuda.get_arch_list

    def get_arch_list() -> list[str]:
        archs = plain()
        break_gpu(error)
        return archs

    torch.cuda.get_arch_list = get_arch_list


def fail_nccl(result: int, message: str) -> None:
    """From now on NCCL fails on this rank."""
    ctypes.CDLL("libnccl.so.2").ncclsim_fail(result, message.encode())
