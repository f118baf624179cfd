"""The device from what a rank can see, and what is fast on it.

There is no GPU here: torch.cuda's answers are given by the tests; tests/train/test_gpu.py asks one.
"""

from __future__ import annotations

import pytest
import torch

from dataset.errors import UserError
from train.device import (
    choose_device,
    choose_precision,
    prefers_channels_last,
)
from train.ranks.launch import Launch

CPU = torch.device("cpu")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """[the number of GPUs that this process can see]."""
    count = [0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count[0] > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count[0])
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr("train.device.require_kernels", lambda *_: None)  # test_gpu_kinds.py
    return count


def launch_of(local_rank: int = 0, local_world_size: int = 1) -> Launch:
    return Launch("a test", "", local_rank=local_rank, local_world_size=local_world_size)


ALL_FOUR = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_STEP_GPUS": "0,1,2,3"}
BOUND = {"CUDA_VISIBLE_DEVICES": "0", "SLURM_STEP_GPUS": "2"}  # --gpus-per-task=1


@pytest.mark.parametrize(
    ("seen", "env", "local_rank", "local_world", "index"),
    [
        (4, ALL_FOUR, 3, 4, 3),  # --gres=gpu:4: every task sees all
        (1, BOUND, 3, 4, 0),  # one bound to each task: its own is number 0, not SLURM_LOCALID
        (1, {}, 0, 1, 0),  # a workstation
        (8, {}, 5, 8, 5),  # torchrun
        (1, {"CUDA_VISIBLE_DEVICES": "GPU-a0223334"}, 0, 1, 0),  # an HTCondor slot
    ],
)
def test_the_gpu_is_chosen_from_what_the_rank_sees(
    gpus: list[int], seen: int, env: dict[str, str], local_rank: int, local_world: int, index: int
) -> None:
    gpus[0] = seen
    device = choose_device("auto", launch_of(local_rank, local_world), env)
    assert device == torch.device("cuda", index)
    assert choose_device("cpu", launch_of(), env) == CPU


@pytest.mark.parametrize(("seen", "local_rank"), [(2, 2), (1, 1), (1, 0)])
def test_more_ranks_than_gpus_are_refused(gpus: list[int], seen: int, local_rank: int) -> None:
    gpus[0] = seen
    with pytest.raises(UserError, match=f"4 ranks on this node see {seen} GPU"):
        choose_device("auto", launch_of(local_rank, 4), {})


def test_without_a_gpu_a_laptop_computes_and_an_allocation_does_not(gpus: list[int]) -> None:
    assert choose_device("auto", launch_of(), {}) == CPU
    assert choose_device("auto", launch_of(), {"CUDA_VISIBLE_DEVICES": ""}) == CPU
    for none in ("-1", "NoDevFiles", "10000"):  # CUDA's, SLURM's and PBS's, HTCondor's
        assert choose_device("auto", launch_of(), {"CUDA_VISIBLE_DEVICES": none}) == CPU
    for env in (ALL_FOUR, BOUND, {"SLURM_JOB_GPUS": "0"}):
        with pytest.raises(UserError, match="no usable CUDA device"):
            choose_device("auto", launch_of(), env)
        assert choose_device("cpu", launch_of(), env) == CPU
    with pytest.raises(UserError, match="no usable CUDA device"):
        choose_device("cuda", launch_of(), {})


def test_precision_is_what_the_device_is_fast_at(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    for major, precision in ((6, "fp32"), (7, "fp16"), (8, "bf16"), (9, "bf16")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, m=major: (m, 0))
        assert choose_precision("auto", cuda) == precision
    assert choose_precision("auto", CPU) == "fp32"
    assert choose_precision("bf16", CPU) == "bf16"
    for wanted in ("fp16", "tf32"):
        with pytest.raises(UserError, match="needs a GPU"):
            choose_precision(wanted, CPU)


# --- cores ------------------------------------------------------------------------------------


def test_the_memory_layout_follows_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels innermost on tensor cores, and on a CPU for large images in formats that gain."""
    cuda = torch.device("cuda", 0)
    for major in (6, 7, 8):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, m=major: (m, 0))
        assert prefers_channels_last(cuda, "fp16", 224) == (major >= 7)
    assert prefers_channels_last(CPU, "fp32", 224)
    assert not prefers_channels_last(CPU, "fp32", 64)
    assert not prefers_channels_last(CPU, "fp64", 224)  # torch computes float64 without oneDNN
