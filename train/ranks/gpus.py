"""GPUs that were given and GPUs that compute: what variables say, and what torch can do (no torch).

torch itself is handed in, so that the slot and the doctor can ask before anything else is imported.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dataset.errors import PassingError, UserError

# Set by SLURM and HTCondor when the job was given GPUs.
GPU_VARIABLES = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES")
# "No GPU": of CUDA, of SLURM and PBS where there are no device files, of HTCondor.
NONE_GIVEN = ("", "-1", "NoDevFiles", "10000")
# The builds of torch for GPUs and drivers that CUDA 13 has left behind; docs/install.md says how.
OLDER_BUILD = (
    "install the cu126 build of torch and torchvision (docs/install.md), which has kernels for "
    "V100 and Pascal and runs with drivers before R580"
)
OLDEST_BUILD = (
    "install the cu118 build of torch 2.7, the last version that has one, and its torchvision "
    "(docs/install.md)"
)


def given_gpus(env: Mapping[str, str]) -> list[str]:
    """The variables that say that this process was given GPUs, as NAME=value."""
    return [f"{n}={env[n]}" for n in GPU_VARIABLES if env.get(n, "").strip() not in NONE_GIVEN]


def count_devices(dev: Path = Path("/dev")) -> int:
    """The GPUs that have a device file here, whether torch can use them or not."""
    return len(list(dev.glob("nvidia[0-9]*")))


def explain_no_gpu(torch: Any) -> str:
    """Why torch can use no GPU at all, and the fix."""
    built_for = torch.version.cuda
    if built_for is None:
        return f"torch {torch.__version__} was built for the CPU only; install a CUDA build"
    driver = _driver_version()
    if 0 < driver < 1000 * int(built_for.partition(".")[0]):
        version = f"{driver // 1000}.{driver % 1000 // 10}"
        text = f"the driver is for CUDA {version}, torch {torch.__version__} for CUDA {built_for}"
        return f"{text}; {name_build(driver)}, or update the driver"
    return f"check the driver with nvidia-smi (torch is built for CUDA {built_for})"


def name_build(driver: int) -> str:
    """What to do about a driver that is older than the CUDA that torch was built for.

    A build runs with every driver of its major version of CUDA.
    """
    builds = {12: OLDER_BUILD, 11: OLDEST_BUILD}
    if driver // 1000 > max(builds):
        return f"install the build of torch for CUDA {driver // 1000}"
    return builds.get(driver // 1000, "no build of torch >= 2.1 runs with it")


def require_kernels(torch: Any, index: int) -> None:
    """Fails unless torch can compute on a GPU: it has kernels for it, and one of them runs."""
    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    archs = torch.cuda.get_arch_list()
    if archs and not any(_runs_on(arch, capability) for arch in archs):
        _refuse_build(torch, name, capability, archs)
    try:
        torch.ones(8, device=f"cuda:{index}").sum().item()  # .item() waits for the kernel's end
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        if "no kernel image" in reason:
            _refuse_build(torch, name, capability, archs)
        raise PassingError(
            f"{name} does not compute: {reason}; look at nvidia-smi, or try another node"
        ) from None


def _driver_version() -> int:
    """The CUDA that the driver is for, as 1000 * major + 10 * minor; 0 without a driver."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


def _runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Whether code for 'sm_80' (of one generation) or 'compute_80' (any later) runs on a GPU."""
    kind, _, number = arch.rstrip("af").partition("_")
    major, minor = divmod(int(number), 10)
    if arch.endswith("a"):  # for this one alone
        return (major, minor) == capability
    if kind == "compute":
        return (major, minor) <= capability
    return major == capability[0] and minor <= capability[1]


def _refuse_build(torch: Any, name: str, capability: tuple[int, int], archs: list[str]) -> None:
    oldest = min((int(a.rstrip("af").partition("_")[2]) for a in archs), default=0)
    fix = "install a newer torch"
    if 10 * capability[0] + capability[1] < oldest:
        fix = OLDER_BUILD if capability >= (6, 0) else "no build of torch >= 2.1 has them"
    raise UserError(
        f"torch {torch.__version__} has no kernels for this GPU, {name}, of capability "
        f"{capability[0]}.{capability[1]}: it has them for {', '.join(archs)}; {fix}"
    )
