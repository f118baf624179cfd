"""What a process finds around it and what of that is wrong: launch, job, CPUs, packages, GPUs."""

from __future__ import annotations

import importlib
import os
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from dataset.errors import CommandError, UserError
from dataset.packages import OLDEST_PYTHON, fix
from train.ranks.cpu_isa import RISKY_FLAGS, VARIABLE, cpu_flags, find_limit, survives_bf16
from train.ranks.cpus import allowed_cpus, cgroup_cpus, slot_cpus
from train.ranks.gpus import count_devices, explain_no_gpu, given_gpus, require_kernels
from train.ranks.launch import Launch

OK, NOTE, WRONG = "ok", "note", "wrong"
FEW_CPUS = 4
MIN_SHM_BYTES = 1 << 30  # the workers of a loader hand their batches over in shared memory
OLDEST_TORCH = (2, 1)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `problem` says what is wrong with it and how to fix it."""

    topic: str
    text: str
    level: str = OK
    problem: str = ""


def look_at_launch(launch: Launch | UserError) -> list[Finding]:
    """How this process was started, and its place among the ranks."""
    if isinstance(launch, UserError):
        return [Finding("launcher", "contradictory", WRONG, str(launch))]
    place = (
        f"{launch.rank} of {launch.world_size}, local rank {launch.local_rank} of "
        f"{launch.local_world_size}, node {launch.node_rank} of {launch.num_nodes}"
    )
    return [
        Finding("launcher", f"{launch.launcher}, because {launch.why}"),
        Finding("rank", place),
    ]


def look_at_master(launch: Launch, ask_slurm: bool) -> Finding:
    """Whether the host of rank 0 can be found from here."""
    host = launch.master_host
    if host is None:
        return Finding("rendezvous", "on this machine" if launch.world_size > 1 else "none needed")
    try:
        if ask_slurm:  # needs torch
            host = importlib.import_module("train.ranks.rendezvous").resolve_host(host)
        return Finding("rendezvous", f"{launch.master_host} is {socket.gethostbyname(host)}")
    except (UserError, OSError) as error:
        problem = (
            f"the host of rank 0, {host!r}, cannot be resolved here ({error}); export MASTER_ADDR"
        )
        return Finding("rendezvous", f"{host}, unknown here", WRONG, problem)


def look_at_job(env: Mapping[str, str]) -> Finding:
    """The job around this process, or the guess that this is a login node."""
    if "_CONDOR_JOB_AD" in env:
        return Finding("job", "an HTCondor slot, so no login node")
    if "SLURM_JOB_ID" in env:
        what = f"SLURM job {env['SLURM_JOB_ID']}, so no login node"
        if shutil.which("scontrol"):
            return Finding("job", f"{what}; requeued before its time limit")
        problem = "scontrol is not on PATH, so the job cannot requeue itself: it will exit 85"
        return Finding("job", what, NOTE, f"{problem}; bind scontrol into the container")
    submits = [tool for tool in ("sbatch", "condor_submit") if shutil.which(tool)]
    if not submits:
        return Finding("job", "none, and no scheduler here: not a login node")
    what = f"none, but {submits[0]} is here: probably a login node"
    problem = "do not train on a login node; submit a job instead (the last line has the command)"
    return Finding("job", what, NOTE, problem)


def look_at_cpus(env: Mapping[str, str]) -> Finding:
    """The cores that this process may use, and which limit is the least."""
    quota, per_task = cgroup_cpus(), env.get("SLURM_CPUS_PER_TASK")
    allowed = allowed_cpus(env)
    text = (
        f"{allowed} usable: {os.cpu_count()} in the machine, {len(os.sched_getaffinity(0))} by "
        f"affinity, {'no' if quota is None else f'{quota:g} by'} cgroup quota, "
        f"SLURM_CPUS_PER_TASK {per_task or 'not set'}"
    )
    if slot_cpus(env):
        text += f", {slot_cpus(env)} by the HTCondor slot"
    if allowed >= FEW_CPUS:
        return Finding("CPUs", text)
    problem = f"{allowed} CPUs will not decode images as fast as a GPU trains"
    if "SLURM_STEP_ID" in env:
        problem += (
            "; since SLURM 22.05 srun needs its own --cpus-per-task (slurm/train.sbatch has it)"
        )
    return Finding("CPUs", text, NOTE, problem)


def look_at_bf16(env: Mapping[str, str]) -> list[Finding]:
    """Whether bf16 runs with all that this CPU offers; nothing where its flags raise no doubt."""
    flags = cpu_flags()
    if VARIABLE in env or not flags & RISKY_FLAGS:
        return []
    limit = find_limit(env, flags, survives_bf16)
    if limit is None:
        return [Finding("bf16", "runs with all instructions that this CPU offers")]
    problem = (
        f"this CPU forbids bf16 instructions that it offers, and kills what uses them; the trainer "
        f"sets {VARIABLE}={limit} by itself, other programs need it too"
    )
    return [Finding("bf16", f"limited to {limit}", NOTE, problem)]


def look_at_memory() -> Finding:
    """Memory of the machine and room for the loader's shared batches."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    shared = free_bytes(Path("/dev/shm"))
    text = f"{gib(total)} in the machine, {gib(shared)} free in /dev/shm"
    if shared >= MIN_SHM_BYTES:
        return Finding("memory", text)
    problem = f"{gib(shared)} of shared memory is little for the loader's workers"
    return Finding("memory", text, NOTE, f"{problem}; run a container with --shm-size 8g, or -j 0")


def look_at_packages() -> tuple[list[Finding], ModuleType | None]:
    """What of Python and of the packages that the trainer needs is here; and torch itself."""
    python = sys.version.split()[0]
    findings = [Finding("Python", f"{python}, {sys.executable}")]
    if sys.version_info < OLDEST_PYTHON:
        problem = f"Python {python} is too old; use {'.'.join(map(str, OLDEST_PYTHON))} or newer"
        findings[0] = Finding("Python", python, WRONG, problem)
    loaded: dict[str, ModuleType | Exception] = {}
    for name in ("numpy", "PIL", "torch", "torchvision"):
        try:
            loaded[name] = importlib.import_module(name)
        except Exception as error:  # a broken build raises OSError, RuntimeError, AttributeError …
            loaded[name] = error
    versions = [
        f"{name} {'none' if isinstance(found, Exception) else found.__version__}"
        for name, found in loaded.items()
    ]
    errors = [f"{name} ({found})" for name, found in loaded.items() if isinstance(found, Exception)]
    torch = loaded["torch"] if isinstance(loaded["torch"], ModuleType) else None
    problem = f"cannot import {', '.join(errors)}; {fix()}" if errors else ""
    if torch and tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
        problem = f"torch {torch.__version__} is too old; {fix()}"
    text = ", ".join(versions)
    if torch:
        cuda = torch.version.cuda
        text += f" (built for {f'CUDA {cuda}' if cuda else 'the CPU only'})"
    findings.append(Finding("packages", text, WRONG if problem else OK, problem))
    return findings, torch


def look_at_gpus(
    env: Mapping[str, str], torch: ModuleType | None, local_rank: int, dev: Path = Path("/dev")
) -> Finding:
    """The GPUs that were given to this process and those that it can use."""
    given = given_gpus(env)
    num_devices = count_devices(dev)
    text = f"given: {', '.join(given) or 'none'}"
    if torch is None:
        return Finding("GPUs", f"{text}; {num_devices} device files; torch is needed to say more")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = sorted({torch.cuda.get_device_name(i) for i in range(count)})
    text += f"; usable: {count or 'none'} {', '.join(names)}".rstrip()
    problem = ""
    if num_devices and count == 0 and not given and "CUDA_VISIBLE_DEVICES" not in env:
        problem = f"there are GPUs here but torch can use none: {explain_no_gpu(torch)}"
        return Finding("GPUs", f"{text}; {num_devices} device files", NOTE, problem)
    if given and count == 0:
        problem = f"{given[0]} but torch can use no GPU: {explain_no_gpu(torch)}, or train with "
        problem += "--device cpu"
    elif 1 < count <= local_rank:
        problem = f"local rank {local_rank} has no GPU of its own among {count}; start fewer ranks"
    elif count:
        problem = _find_gpu_problem(torch, 0 if count == 1 else local_rank)
    return Finding("GPUs", text, WRONG if problem else OK, problem)


def _find_gpu_problem(torch: ModuleType, index: int) -> str:
    try:
        require_kernels(torch, index)
    except CommandError as error:
        return str(error)
    return ""


def free_bytes(place: Path) -> int:
    """Free space at a place, 0 where there is no such place."""
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return 0


def gib(num_bytes: int) -> str:
    """A number of bytes for people."""
    return f"{num_bytes / 2**30:.1f} GiB"
