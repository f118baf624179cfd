"""The simulator computes what the CPU computes, and a wait that is missing shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu_sim import ranks as gpu
from tests.train import hooks
from tests.train import started_ranks as ranks

pytestmark = [pytest.mark.gpusim, pytest.mark.timeout(300)]
STEPS = ["--precision", "fp64", "--max-steps", "2", "--save-model"]


def weights(out: Path) -> dict[str, torch.Tensor]:
    (path,) = out.glob("*.pt")
    loaded: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return loaded


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference, relative to the largest value of its tensor."""
    pairs = [(a[name].double(), b[name].double()) for name in a]
    return max(float((x - y).abs().max() / (x.abs().max() + 1e-3)) for x, y in pairs)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_weights_are_those_of_the_cpu_however_late_copies_and_collectives_end(
    images: Path, tmp_path: Path, num_ranks: int
) -> None:
    argv = ["-a", ranks.REAL_ARCH, str(images), *STEPS]
    log = tmp_path / "log"
    ranks.run([*argv, "--output", f"{tmp_path}/cpu"], log, num_ranks).expect(0)
    for delay_us in (0, 20_000):
        settings = {"CUDASIM_DMA_US": delay_us, "NCCLSIM_US": delay_us}
        out = tmp_path / f"gpu-{delay_us}"
        gpu.run([*argv, "--output", str(out)], log, num_ranks, settings=settings).expect(0)
    cpu, quick, slow = (weights(tmp_path / name) for name in ("cpu", "gpu-0", "gpu-20000"))
    assert furthest(quick, slow) == 0
    assert furthest(cpu, quick) < 1e-6


def forget_to_wait() -> None:
    """The mutation: a batch is used before its copy to the device has ended."""
    hooks.set_value("train.data.loader", "_hand_over", lambda batch, _copied: batch)


def test_a_batch_that_is_used_before_its_copy_has_ended_shows(images: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train").symlink_to(images / "train")  # nothing to validate: each copy is slow
    argv = [str(tmp_path / "data"), *STEPS, "--max-steps", "1", "--output"]
    settings = {"CUDASIM_TO_DEVICE_US": 5_000_000}  # the next batch is read in less
    log = tmp_path / "log"
    gpu.run([*argv, f"{tmp_path}/right"], log, settings=settings).expect(0)
    job = gpu.run([*argv, f"{tmp_path}/wrong"], log, settings=settings, hook=forget_to_wait)
    right = weights(tmp_path / "right")
    assert job.codes != [0] or furthest(right, weights(tmp_path / "wrong")) > 1e-3
