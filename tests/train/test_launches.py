"""A step asks a GPU for a known number of operators, and does not wait for it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_sim import ranks as gpu

pytestmark = [pytest.mark.gpusim, pytest.mark.timeout(300)]
# DDP takes times, and waits for them, in the first ten steps and then in each hundredth.
NUM_STEPS = {1: 2, 2: 12}
# Operators of one step of resnet50 in bf16; docs/performance.md names these numbers.
BUDGET = {1: 505, 2: 669}


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

    Trainer.run_step = run_step  # type: ignore[method-assign]


def count_last_step(folder: Path, num_ranks: int, *flags: str) -> dict[str, dict[str, int]]:
    """What a step asks for; nothing is computed, so that a loss which is no number may end it."""
    argv = ["--dummy", "-b", str(4 * num_ranks), "--max-steps", str(NUM_STEPS[num_ranks])]
    argv += ["-p", "1000"]
    hook = partial(write_counts, folder / "counts.json")
    output = ["--output", str(folder / "out")]
    settings = {"CUDASIM_MODE": "shape"}
    gpu.run(
        [*argv, *flags, *output], folder / "log", num_ranks, settings=settings, hook=hook
    ).expect(0, 4)
    counts: dict[str, dict[str, int]] = json.loads((folder / "counts.json").read_text())
    return counts


def assert_no_wait(counts: dict[str, dict[str, int]], num_votes: int) -> None:
    """Of the votes one event is waited for: that of the forward pass of the step before."""
    assert {line for line, number in counts["syncs"].items() if number} == set()
    waits = {name: n for name, n in counts["runtime"].items() if name.startswith("sync_") and n}
    assert waits == ({"sync_event": num_votes} if num_votes else {})


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_step_of_resnet50_keeps_to_its_budget_of_operators(
    tmp_path: Path, num_ranks: int
) -> None:
    counts = count_last_step(tmp_path, num_ranks, "-a", "resnet50", "--precision", "bf16")
    assert sum(counts["launches"].values()) <= BUDGET[num_ranks], counts["launches"]
    assert_no_wait(counts, num_ranks - 1)


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
    assert_no_wait(counts, 0 if "microbatch" in flags else 1)
