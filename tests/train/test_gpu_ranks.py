"""Ranks on GPUs: who computes on which, and how the end of one is told by all."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from dataset.errors import CHECKPOINTED, CRASH, TRY_AGAIN, USER_MISTAKE
from tests.gpu_sim import ranks as gpu
from tests.gpu_sim import stories
from tests.train import hooks
from tests.train import started_ranks as ranks

pytestmark = [pytest.mark.gpusim, pytest.mark.timeout(300)]
DUMMY = ["--dummy", "--max-steps", "3"]
NCCL_BACKENDS: list[dict[str, int]] = [{}, {"TORCH_DIST_USE_NCCL2": 0}]  # torch's new, its older


def map_by_node(rank: int) -> dict[str, str]:
    """The variables of `mpirun --map-by node` on 2 nodes with 2 GPUs to see each."""
    node, local = rank % 2, rank // 2
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        "PMIX_NAMESPACE": f"job-{os.getpid()}",
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDASIM_DEVICES": "2",
        "CUDASIM_NODE": f"n{node}",
    }


@pytest.mark.parametrize(
    ("env", "num_ranks"),
    [
        pytest.param(gpu.slurm_step(2, 1, 4), 2, id="1 task a node that sees 4 GPUs"),
        pytest.param(gpu.slurm_step(2, 2, 3, is_cyclic=True), 4, id="cyclic, 2 tasks of 3 GPUs"),
        pytest.param(map_by_node, 2, id="mpirun --map-by node"),
    ],
)
def test_nccl_works_on_the_gpu_of_the_model(
    tmp_path: Path, env: gpu.Environment, num_ranks: int
) -> None:
    argv = [*DUMMY, "--output", str(tmp_path)]
    gpu.run(argv, tmp_path / "log", num_ranks, env=env).expect(0)
    assert gpu.read_run(tmp_path)["images_trained"] == 3 * 8


def test_torch_s_older_nccl_backend_trains_too(tmp_path: Path) -> None:
    argv = [*DUMMY, "--output", str(tmp_path)]
    env = gpu.slurm_step(2, 1, 4)
    gpu.run(argv, tmp_path / "log", 2, env=env, settings=NCCL_BACKENDS[1]).expect(0)


def test_two_ranks_on_one_gpu_are_refused_by_their_numbers(tmp_path: Path) -> None:
    """--gres=gpu:1 with two tasks: both see the only one."""
    argv = [*DUMMY, "--output", str(tmp_path)]
    job = gpu.run(argv, tmp_path / "log", 2, env=gpu.slurm_step(1, 2, 1)).expect(USER_MISTAKE)
    assert "rank 0 and rank 1 share one GPU" in job.log
    assert "Traceback" not in job.log


def fail_nccl_on_rank_1(message: str) -> None:
    if hooks.own_rank() == 1:
        stories.fail_nccl(stories.NCCL_SYSTEM_ERROR, message)


def test_a_communicator_that_fails_says_nccl_s_own_error_and_leaves_a_record(
    tmp_path: Path,
) -> None:
    argv = [*DUMMY, "--output", str(tmp_path)]
    hook = partial(fail_nccl_on_rank_1, "NET/IB : no device mlx5_7")
    job = gpu.run(argv, tmp_path / "log", 2, hook=hook).expect(TRY_AGAIN)
    assert "no device mlx5_7" in job.log
    assert "NCCL_DEBUG=INFO" in job.log
    assert "Traceback" not in job.log
    run = gpu.read_run(tmp_path)
    assert (run["status"], run["exit_code"]) == ("failed", TRY_AGAIN)
    assert "no device mlx5_7" in run["attempts"][-1]["reason"]


@pytest.mark.parametrize("backend", NCCL_BACKENDS)
def test_an_nccl_error_in_training_is_not_called_a_rank_that_answers_again(
    tmp_path: Path, backend: dict[str, int]
) -> None:
    action = partial(stories.fail_nccl, stories.NCCL_SYSTEM_ERROR, "NET/IB : port 1 is down")
    argv = [*DUMMY, "--output", str(tmp_path)]
    hook = partial(stories.at_step, 1, 2, action)
    job = gpu.run(argv, tmp_path / "log", 2, hook=hook, settings=backend).expect(TRY_AGAIN)
    assert "port 1 is down" in job.log
    assert "answers again" not in job.log
    assert gpu.read_run(tmp_path)["exit_code"] == TRY_AGAIN


@pytest.mark.parametrize(("num_ranks", "backend"), [(1, {}), *[(2, b) for b in NCCL_BACKENDS]])
def test_an_ecc_error_of_one_gpu_ends_all_ranks_with_75(
    tmp_path: Path, num_ranks: int, backend: dict[str, int]
) -> None:
    argv = [*DUMMY, "--max-steps", "30", "--output", str(tmp_path)]
    hook = partial(stories.at_step, num_ranks - 1, 2, stories.break_gpu)
    job = gpu.run(argv, tmp_path / "log", num_ranks, hook=hook, settings=backend)
    job.expect(TRY_AGAIN)
    assert "uncorrectable ECC error" in job.log
    assert "run the same command again" in job.log
    assert gpu.read_run(tmp_path)["exit_code"] == TRY_AGAIN


def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    argv = [*DUMMY, "--max-steps", "30", "--timeout-minutes", "0.2", "--output", str(tmp_path)]
    hook = partial(stories.at_step, 1, 2, hooks.kill_myself)
    job = gpu.run(argv, tmp_path / "log", 2, hook=hook)
    assert job.codes == [CRASH, -signal.SIGKILL]
    assert "lost contact with rank 1" in job.log
    run = gpu.read_run(tmp_path)
    assert (run["status"], run["exit_code"]) == ("failed", CRASH)


@pytest.mark.parametrize(("number", "num_ranks"), [(signal.SIGUSR2, 2), (signal.SIGTERM, 1)])
def test_a_preempted_gpu_run_goes_on_on_the_cpu(
    images: Path, tmp_path: Path, number: signal.Signals, num_ranks: int
) -> None:
    out = tmp_path / "out"
    argv = [str(images), "--precision", "fp32", "--epochs", "2", "--output", str(out)]
    hook = partial(stories.at_step, 0, 3, partial(hooks.signal_myself, number))
    gpu.run(argv, tmp_path / "log", num_ranks, hook=hook).expect(CHECKPOINTED)
    step = gpu.read_run(out)["images_trained"] // 8
    assert 3 <= step < 10
    job = ranks.run(["-a", ranks.REAL_ARCH, *argv], tmp_path / "log2", 1).expect(0)
    assert f"continuing from step {step} of 10" in job.log
    assert gpu.read_run(out)["images_trained"] == 80
