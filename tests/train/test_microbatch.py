"""The microbatch is the largest that every GPU takes, and the trial for it leaves no trace."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from dataset.errors import DONE, TRY_AGAIN, USER_MISTAKE, PassingError, UserError
from tests.gpu_sim import ranks as gpu_ranks
from tests.train import hooks
from tests.train import started_ranks as ranks
from tests.train.outcomes import final_state, find_differences
from train.config import TrainConfig
from train.failure import explain
from train.microbatch import SPARE_BYTES, choose_microbatch, divisors, make_plan
from train.ranks.comm import Comm
from train.ranks.launch import Launch
from train.records.record import read_run

SLOT = {"_CONDOR_JOB_AD": "job.ad"}


class Ranks:
    """The answers of other ranks, in place of their processes."""

    def __init__(self, *others: Any) -> None:
        self._others = others

    def gather(self, value: Any) -> list[Any]:
        return [value, *self._others]


def choose(batch: int, limit: int, *others: int, earlier: int | None = None, **flags: Any) -> int:
    """The microbatch of a rank whose GPU takes `limit` images; the others have found theirs."""
    cfg = TrainConfig(dummy=True, **flags)
    comm: Any = Ranks(*others)
    return choose_microbatch(cfg, batch, comm, earlier, lambda number: number <= limit)


def test_the_largest_divisor_that_fits_is_taken_the_least_over_the_ranks() -> None:
    assert list(divisors(12)) == [12, 6, 4, 3, 2, 1]
    assert choose(256, 1000) == 256
    assert choose(256, 200) == 128
    assert choose(100, 30) == 25
    assert choose(256, 200, 256, 64) == 64
    assert choose(256, 200, largest_microbatch=32) == 32
    assert choose(256, 10, microbatch=256) == 256  # the user knows


def test_without_a_gpu_the_batch_of_a_rank_is_taken() -> None:
    cfg = TrainConfig(dummy=True, largest_microbatch=64)
    comm: Any = Ranks()
    assert choose_microbatch(TrainConfig(dummy=True), 256, comm, None, None) == 256
    assert choose_microbatch(cfg, 256, comm, None, None) == 64


def test_a_run_that_goes_on_keeps_its_groups_or_says_why_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert choose(256, 1000, earlier=32) == 32
    assert choose(48, 1000, earlier=32) == 48  # does not divide any more: with a warning
    for others in ((), (False,)):
        with pytest.raises(UserError, match=r"groups of 64 images.*--microbatch 32"):
            choose(256, 1000 if others else 32, *others, earlier=64)
    monkeypatch.setenv("_CONDOR_JOB_AD", "job.ad")
    with pytest.raises(PassingError, match="tried again elsewhere"):
        choose(256, 32, earlier=64)


def test_a_gpu_that_takes_no_image_is_refused() -> None:
    with pytest.raises(UserError, match="not even one image of 224 pixels"):
        choose(256, 0)


@pytest.mark.parametrize("flag", ["microbatch", "largest_microbatch"])
def test_a_microbatch_that_does_not_divide_is_refused(flag: str) -> None:
    cfg = TrainConfig(dummy=True, batch_size=8, **{flag: 3})  # type: ignore[arg-type]
    words = f"--{flag.replace('_', '-')} 3 does not divide the 8 images of a rank"
    with pytest.raises(UserError, match=words):
        make_plan(cfg, 100, Launch("single", "a test"), Comm(Launch("single", "a test")))


@pytest.mark.parametrize(
    "error",
    [
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ],
)
def test_out_of_memory_is_final_only_outside_of_a_slot(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    message, code = explain(error)
    assert code == USER_MISTAKE and "use a smaller --microbatch" in message
    monkeypatch.setenv("_CONDOR_JOB_AD", "job.ad")
    assert explain(error)[1] == TRY_AGAIN


# --- on simulated GPUs, whose limits of memory are real -------------------------------------------

# ResNet-18 at 64 px in 16 bits reserves 624 MB for 128 images, 576 for 64; nothing is computed.
NETWORK = ["--dummy", "-a", "resnet18", "--image-size", "64", "-b", "256", "--max-steps", "2"]
SHAPE = {"CUDASIM_MODE": "shape"}
SPARE_MB = SPARE_BYTES >> 20


def with_memory(*megabytes: int) -> Any:
    """The variables of ranks whose GPUs have so much memory each."""
    port = ranks.find_free_port()

    def variables(rank: int) -> dict[str, str]:
        launch = ranks.rank_variables(rank, len(megabytes), port)
        return launch | SHAPE | {"CUDASIM_MEMORY_MB": str(megabytes[rank])}

    return variables


def accept_numbers() -> None:
    """Nothing is computed, so a checkpoint holds what lay in memory."""
    hooks.set_value("train.checkpoints.checkpoint", "all_finite", bool)


def note_memory() -> None:
    """Prints whether the choice left memory in use, or moved the random numbers."""
    accept_numbers()

    def look() -> tuple[int, int, int]:
        random = int(torch.get_rng_state().sum()), torch.initial_seed()
        return torch.cuda.memory_allocated(), *random

    @functools.wraps(make_plan)
    def noting(*args: Any, **kwargs: Any) -> Any:
        before, reserved = look(), torch.cuda.memory_reserved()
        plan = make_plan(*args, **kwargs)
        is_clean = look() == before and torch.cuda.memory_reserved() <= reserved
        print("no trace" if is_clean else f"traces: {before} {look()}", flush=True)
        return plan

    hooks.set_value("train.prepare", "make_plan", noting)


@pytest.mark.gpusim
@pytest.mark.timeout(300)
def test_the_microbatch_is_what_the_smallest_gpu_takes_and_a_resume_keeps_it(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    argv = [*NETWORK, "--output", str(out)]
    small = gpu_ranks.run(
        argv, tmp_path / "log1", 2, env=with_memory(8000, SPARE_MB + 344), hook=note_memory
    )
    small.expect(DONE)
    chosen = read_run(out)["config"]["microbatch"]
    assert chosen == 64
    assert f"microbatches of {chosen}: 128 images at once do not fit" in small.log
    assert small.log.count("no trace") == 2, small.log
    go_on = [*argv, "--max-steps", "3"]
    tiny = with_memory(SPARE_MB + 260)
    job = gpu_ranks.run(go_on, tmp_path / "log2", env=tiny).expect(USER_MISTAKE)
    assert f"normalises over groups of {chosen} images" in job.log
    slot = gpu_ranks.run(go_on, tmp_path / "log3", env=lambda rank: tiny(rank) | SLOT)
    assert "tried again elsewhere" in slot.expect(TRY_AGAIN).log
    job = gpu_ranks.run(go_on, tmp_path / "log4", env=with_memory(8000), hook=accept_numbers)
    job.expect(DONE)
    assert read_run(out)["config"]["microbatch"] == chosen


@pytest.mark.gpusim
@pytest.mark.timeout(300)
def test_the_trial_changes_nothing_of_the_training(images: Path, tmp_path: Path) -> None:
    states = []
    for name, flags in (("auto", []), ("given", ["--microbatch", "8"])):
        out = tmp_path / name
        argv = [str(images), "--epochs", "1", "--ema", "0.9", "--output", str(out), *flags]
        gpu_ranks.run(argv, tmp_path / f"{name}.log").expect(DONE)
        states.append(final_state(out))
    assert find_differences(states[0], states[1]) == []
    names = [
        sorted(path.name for path in (tmp_path / name).rglob("*")) for name in ("auto", "given")
    ]
    assert names[0] == names[1]
