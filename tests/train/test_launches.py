"""A step asks a GPU for a known number of operators, and does not wait for it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_sim import ranks as gpu
from tests.gpu_sim.budget import BUDGET

pytestmark = [pytest.mark.gpusim, pytest.mark.timeout(300)]
# DDP itself takes times, and waits for their events, in the first ten steps and each hundredth.
FEW, PAST_DDP = 3, 12


def write_counts(path: Path) -> None:
    """Writes down what rank 0's last step asked for; a hook of a rank."""
    import os

    from tests.gpu_sim import operators
    from train.step import Trainer

    plain = Trainer.run_step

    def look() -> dict[str, dict[str, int]]:
        parts = {"launches": operators.launches, "syncs": operators.syncs}
        return {"runtime": operators.counters()} | {name: dict(c) for name, c in parts.items()}

    def run_step(*args: Any) -> Any:
        before = look()
        answer = plain(*args)
        counts = {
            kind: {name: n - before[kind].get(name, 0) for name, n in now.items()}
            for kind, now in look().items()
        }
        if os.environ.get("RANK", "0") == "0":
            path.write_text(json.dumps(counts))
        return answer

    Trainer.run_step = run_step  # type: ignore[method-assign,assignment]


def count_last_step(
    folder: Path, num_ranks: int, *flags: str, num_steps: int = FEW
) -> dict[str, dict[str, int]]:
    """What a step asks for; nothing is computed, so that a loss which is no number may end it."""
    argv = ["--dummy", "-b", str(4 * num_ranks), "--max-steps", str(num_steps)]
    argv += ["-p", "1000"]
    hook = partial(write_counts, folder / "counts.json")
    output = ["--output", str(folder / "out")]
    settings = {"CUDASIM_MODE": "shape"}
    gpu.run(
        [*argv, *flags, *output], folder / "log", num_ranks, settings=settings, hook=hook
    ).expect(0, 4)
    counts: dict[str, dict[str, int]] = json.loads((folder / "counts.json").read_text())
    return counts


def name_waits(counts: dict[str, dict[str, int]]) -> dict[str, int]:
    """Where the host waited for the device, and how often; events apart."""
    runtime = {name: n for name, n in counts["runtime"].items() if name.startswith("sync_")}
    del runtime["sync_event"]
    return {line: number for line, number in (counts["syncs"] | runtime).items() if number}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_step_of_resnet50_keeps_to_its_budget_of_operators(
    tmp_path: Path, num_ranks: int
) -> None:
    counts = count_last_step(tmp_path, num_ranks, "-a", "resnet50", "--precision", "bf16")
    assert sum(counts["launches"].values()) <= BUDGET[num_ranks], counts["launches"]
    assert name_waits(counts) == {}


@pytest.mark.parametrize(
    "flags",
    [
        "--precision tf32 --recipe lars --lr 1",
        "--precision fp32 --ema 0.9",
        "--precision fp16",
        "--precision fp16 --microbatch 2",
    ],
)
def test_a_step_does_not_wait_for_the_device(tmp_path: Path, flags: str) -> None:
    """fp16 with LARS or with --ema does, once a step (docs/performance.md)."""
    counts = count_last_step(tmp_path, 2, "-a", "resnet18", *flags.split())
    assert name_waits(counts) == {}


def test_a_step_waits_for_the_votes_of_the_one_before_and_for_no_other_event(
    tmp_path: Path,
) -> None:
    flags = ("-a", "resnet18", "--precision", "bf16")
    counts = count_last_step(tmp_path, 2, *flags, num_steps=PAST_DDP)
    assert counts["runtime"]["sync_event"] == 1
    assert name_waits(counts) == {}
