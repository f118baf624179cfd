"""Which vector instructions bf16 may use on this CPU: some virtual machines forbid what they offer.

A CPU may advertise AMX while its hypervisor forbids it: torch, cpuid and arch_prctl all say that it
is fine, and the first bf16 product ends the process with SIGILL. Only trying it tells, in a child
process, before torch is imported here: oneDNN reads its limit once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

VARIABLE = "ONEDNN_MAX_CPU_ISA"
# oneDNN's names, from the most to the least; the last one is slow and runs on any x86-64 of today.
LADDER = ("ALL", "AVX512_CORE_FP16", "AVX512_CORE_BF16", "AVX512_CORE", "AVX2")
RISKY_FLAGS = {"amx_tile", "amx_bf16", "amx_fp16", "avx512_bf16", "avx512_fp16"}
PROBE_S = 120.0
PROBE = """
import torch
net = torch.nn.Sequential(torch.nn.Conv2d(16, 32, 3), torch.nn.Flatten(), torch.nn.Linear(1152, 64))
with torch.autocast("cpu", torch.bfloat16):
    net(torch.randn(8, 16, 8, 8)).float().sum().backward()
"""


def find_limit(
    env: Mapping[str, str], flags: set[str], survives: Callable[[str], bool]
) -> str | None:
    """The limit that oneDNN must be given here, or None where none is needed."""
    if VARIABLE in env or not flags & RISKY_FLAGS:
        return None
    if survives(LADDER[0]):
        return None
    # Where even the least does not survive, the reason is another: the training itself will tell.
    return next((isa for isa in LADDER[1:] if survives(isa)), None)


def limit_bf16() -> str | None:
    """Finds and sets the limit for this process and its children; gives it where one was needed."""
    limit = find_limit(os.environ, cpu_flags(), survives_bf16)
    if limit:
        os.environ[VARIABLE] = limit
        print(f"bf16: this CPU forbids instructions that it offers; {VARIABLE}={limit}", flush=True)
    return limit


def survives_bf16(isa: str) -> bool:
    """Whether a bf16 step of a small network, limited to these instructions, is not killed."""
    command = [sys.executable, "-c", PROBE]
    env = {**os.environ, VARIABLE: isa, "CUDA_VISIBLE_DEVICES": ""}
    return not is_killed_by_instruction(command, env)


def is_killed_by_instruction(command: list[str], env: Mapping[str, str]) -> bool:
    """Whether the command ends with SIGILL; any other end says nothing of the instructions."""
    try:
        done = subprocess.run(command, env=env, capture_output=True, timeout=PROBE_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == -signal.SIGILL


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """What the CPU advertises; empty where that cannot be read (not Linux on x86)."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except (OSError, ValueError):
        return set()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())
