"""Runs the trainer on simulated GPUs: any number of ranks and nodes."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.train import started_ranks as ranks
from tests.train.started_ranks import Hook, Job

Environment = Callable[[int], dict[str, str]]
HAS_GPU = Path("/dev/nvidia0").exists()


def start(
    argv: list[str],
    log: Path,
    num_ranks: int = 1,
    *,
    env: Environment | None = None,
    settings: Mapping[str, object] | None = None,
    hook: Hook | None = None,
) -> Job:
    """The trainer under way with --device cuda; by default each rank has a GPU of one node.

    env(rank) is given instead of torchrun's variables, settings are those of the simulator.
    """
    port = ranks.find_free_port()
    launch = env or functools.partial(ranks.rank_variables, num_ranks=num_ranks, port=port)
    added = {"CUDASIM_DEVICES": num_ranks} | dict(settings or {})
    texts = {name: str(value) for name, value in added.items()}
    return ranks.start(
        ["--device", "cuda", *argv],
        log,
        num_ranks,
        env=lambda rank: texts | launch(rank),
        hook=functools.partial(_simulate, hook),
        simulated=True,
    )


def run(argv: list[str], log: Path, num_ranks: int = 1, **options: Any) -> Job:
    """The trainer from start to end."""
    job = start(argv, log, num_ranks, **options)
    job.wait()
    return job


def call(function: Hook, log: Path, **settings: object) -> Job:
    """A function that ran in a process with simulated GPUs."""
    env = {name: str(value) for name, value in settings.items()}
    job = ranks.call(functools.partial(_simulate, function), log, env=env, simulated=True)
    job.wait()
    return job


def run_on_gpu(argv: list[str], log: Path, **settings: object) -> Job:
    """The trainer on this machine's GPU, or on a simulated one where there is none."""
    if not HAS_GPU:
        return run(argv, log, settings=settings)
    return ranks.run(["-a", ranks.REAL_ARCH, "--device", "cuda", *argv], log)


def slurm_step(
    num_nodes: int, per_node: int, gpus_seen: int, *, is_cyclic: bool = False
) -> Environment:
    """The variables of a task of an srun step on so many nodes, each with so many GPUs to see."""
    num_tasks, job = num_nodes * per_node, str(time.monotonic_ns() % 10**9)
    seen = ",".join(map(str, range(gpus_seen)))

    def variables(rank: int) -> dict[str, str]:
        node, local = divmod(rank, per_node)
        if is_cyclic:
            local, node = divmod(rank, num_nodes)
        numbers = {
            "SLURM_STEP_ID": 0,
            "SLURM_PROCID": rank,
            "SLURM_STEP_NUM_TASKS": num_tasks,
            "SLURM_LOCALID": local,
            "SLURM_NODEID": node,
            "SLURM_STEP_NUM_NODES": num_nodes,
            "CUDASIM_DEVICES": gpus_seen,
        }
        return {name: str(value) for name, value in numbers.items()} | {
            "SLURM_JOB_ID": job,
            "SLURM_STEP_NODELIST": f"n[1-{num_nodes}]",
            "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{num_nodes})",
            "SLURM_STEP_GPUS": seen,
            "CUDA_VISIBLE_DEVICES": seen,
            "CUDASIM_NODE": f"n{node + 1}",
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
        }

    return variables


def read_run(out: Path) -> dict[str, Any]:
    """The record of a run."""
    record: dict[str, Any] = json.loads((out / "run.json").read_text())
    return record


def _simulate(hook: Hook | None) -> None:
    """Called in a rank before the trainer starts."""
    from tests.gpu_sim import operators
    from tests.train import hooks

    operators.install()
    # as if the driver were here: the figures are NVML's
    hooks.set_value("train.records.stage_meter", "_GPU_DEVICES", ("/dev",))
    if hook is not None:
        hook()
    os.environ.pop("LD_PRELOAD", None)
