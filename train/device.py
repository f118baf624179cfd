"""Which device a rank computes on, from what it can see, and how its threads are set."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping

import torch

from dataset.errors import UserError
from dataset.words import count
from train.ranks.cpus import BOOT_ID, cpus_of_rank
from train.ranks.gpus import explain_no_gpu, given_gpus, require_kernels
from train.ranks.launch import Launch

TENSOR_CORES = 7  # the capability from which 16-bit formats and channels_last are fast
MIN_CHANNELS_LAST_SIZE = 128  # pixels, on a CPU: faster at 224, no clear gain at 64
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of mallopt(3)


def choose_device(wanted: str, launch: Launch, env: Mapping[str, str]) -> torch.device:
    """This rank's device; GPUs that were given but cannot be used are an error."""
    if wanted == "cpu":
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus == 0:
        given = given_gpus(env)
        if wanted == "cuda" or given:
            seen = f" ({given[0]})" if given else ""
            raise UserError(
                f"no usable CUDA device{seen}: {explain_no_gpu(torch)}, or train on the CPU "
                "(--device cpu)"
            )
        return torch.device("cpu")
    # With one GPU bound to each task every rank sees its own as number 0.
    index = 0 if num_gpus == 1 else launch.local_rank
    if index >= num_gpus or (num_gpus == 1 and launch.local_world_size > 1 and _all_see_one(env)):
        raise UserError(
            f"{launch.local_world_size} ranks on this node see {count(num_gpus, 'GPU')}; "
            "ask for one GPU per rank"
        )
    torch.cuda.set_device(index)
    require_kernels(torch, index)
    return torch.device("cuda", index)


def choose_precision(wanted: str, device: torch.device) -> str:
    """The number format: the one named, else one that is fast on the device."""
    if wanted != "auto":
        if wanted in ("tf32", "fp16") and device.type == "cpu":
            raise UserError(f"--precision {wanted} needs a GPU; this run is on the CPU: use fp32")
        return wanted
    if device.type == "cpu":
        return "fp32"  # bf16 was measured 15x slower on CPUs without AMX
    major, _ = torch.cuda.get_device_capability(device)
    if major < TENSOR_CORES:
        return "fp32"  # Pascal computes fp16 at 1/64 of the speed (P100: no faster in training)
    return "bf16" if major >= 8 else "fp16"


def set_up_math(precision: str, device: torch.device) -> None:
    """Lets matrix products and convolutions use TF32 if the precision allows it."""
    if device.type == "cuda":
        allow = precision in ("tf32", "bf16", "fp16")
        torch.backends.cuda.matmul.allow_tf32 = allow
        torch.backends.cudnn.allow_tf32 = allow
        torch.backends.cudnn.benchmark = True


def prefers_channels_last(device: torch.device, precision: str, image_size: int) -> bool:
    """Whether the model is faster with the channels innermost, as benchmarks/step.py measured."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= TENSOR_CORES
    return precision != "fp64" and image_size >= MIN_CHANNELS_LAST_SIZE


def keep_freed_memory() -> None:
    """Lets a process that trains on a CPU keep the memory of freed activations for the next step.

    Otherwise glibc returns every large block to the kernel, which clears its pages again a moment
    later; benchmarks/step.py measures the gain. Without glibc this does nothing.
    """
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):
        ctypes.CDLL(None).mallopt(M_MMAP_MAX, 0)
        ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def choose_threads(
    threads: int | None,
    workers: int | None,
    device: torch.device,
    launch: Launch,
    num_sharing: int | None = None,
) -> tuple[int, int]:
    """(compute threads, loader workers) of this rank, from the cores that are really its own."""
    cores = cpus_of_rank(os.environ, launch.local_world_size, num_sharing)
    if device.type == "cuda":
        return threads or 1, min(cores, 16) if workers is None else workers
    # On a CPU the network is the slow part: one decoder feeds several computing cores.
    default_workers = 0 if cores == 1 else max(1, cores // 8)
    # torchrun sets OMP_NUM_THREADS to 1 a rank, unless it is set: HTCondor sets it to the cores of
    # the slot, which all ranks in it share.
    asked = os.environ.get("OMP_NUM_THREADS", "")
    own = min(int(asked), cores) if asked.isdecimal() and int(asked) > 0 else cores
    return threads or own, default_workers if workers is None else workers


def identify_gpu(device: torch.device) -> str:
    """A name for this GPU that is unique over all nodes; empty where there is none."""
    if device.type != "cuda":
        return ""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)  # not in torch 2.1
    return f"{BOOT_ID.read_text().strip()}/GPU-{uuid}" if uuid and BOOT_ID.exists() else ""


def name_device(device: torch.device) -> str:
    """The model name that tables show: 'cpu' or the GPU's own name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _all_see_one(env: Mapping[str, str]) -> bool:
    """Whether all ranks of the node see the same single GPU: none was bound to each task."""
    return "SLURM_STEP_GPUS" not in env and "," not in env.get("CUDA_VISIBLE_DEVICES", "0")
