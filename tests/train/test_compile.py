"""--compile trains, accumulates, resumes and evaluates as the plain model does."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from dataset.errors import DONE
from tests.train import hooks
from tests.train import started_ranks as ranks
from tests.train.outcomes import EVERY_STEP, final_state, find_differences
from train.records.record import read_epochs

ARGV = ["--epochs", "1", "--microbatch", "2", "--ema", "0.9"]


def run(images: Path, out: Path, world: int, *flags: str) -> None:
    argv = [str(images), *ARGV, "--output", str(out), *flags]
    log = out.with_name(f"{out.name}.log")
    ranks.run(argv, log, world, hook=hooks.capture_only).expect(DONE)


@pytest.mark.parametrize(
    "arch",
    [
        pytest.param(ranks.ARCH, marks=pytest.mark.story),
        pytest.param("resnet18", marks=pytest.mark.soak),
    ],
)
def test_a_compiled_model_trains_as_the_plain_one(images: Path, tmp_path: Path, arch: str) -> None:
    """On two ranks, in microbatches that do not talk, and evaluated."""
    run(images, tmp_path / "plain", 2, "-a", arch)
    run(images, tmp_path / "compiled", 2, "-a", arch, "--compile")
    plain, compiled = (final_state(tmp_path / name)["model"] for name in ("plain", "compiled"))
    assert plain.keys() == compiled.keys()
    for name, value in plain.items():
        torch.testing.assert_close(compiled[name], value, msg=name)
    assert read_epochs(tmp_path / "compiled")[0]["val_acc1"] is not None


@pytest.mark.soak
@pytest.mark.parametrize("world", [1, 2])
def test_a_compiled_model_resumes(images: Path, tmp_path: Path, world: int) -> None:
    run(images, tmp_path / "whole", world, "-a", "resnet18", "--compile")
    parts = tmp_path / "parts"
    argv = [str(images), *ARGV, "-a", "resnet18", "--output", str(parts), "--compile", *EVERY_STEP]
    kill = partial(hooks.at_step, 0, 3, partial(hooks.wait_and_kill, parts, 2))
    both = partial(hooks.all_of, hooks.capture_only, kill)
    killed = ranks.run(argv, tmp_path / "killed.log", world, hook=both)
    assert killed.codes[0] == -signal.SIGKILL
    run(images, parts, world, "-a", "resnet18", "--compile")
    assert find_differences(final_state(parts), final_state(tmp_path / "whole")) == []
