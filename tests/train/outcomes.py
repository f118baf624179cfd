"""What a run left behind, for a comparison with another run: states, epochs, samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from dataset.errors import CHECKPOINTED
from train.checkpoints.checkpoint import load_latest
from train.records.record import read_run

EVERY_STEP = ["--checkpoint-minutes", "1e-9"]


def final_state(out: Path) -> dict[str, Any]:
    _, state = load_latest(out / "ckpt")
    assert state is not None
    return state


def find_differences(a: Any, b: Any, where: str = "") -> list[str]:
    """The places at which two states differ in any bit, timings excepted."""
    if torch.is_tensor(a):
        return [] if torch.equal(a, b) and a.dtype == b.dtype else [where]
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return [f"{where}: {sorted(a.keys() ^ b.keys(), key=str)}"]
        timings = {"seconds", "data_wait_s", "network_wait_s"}
        return [
            d for k in a if k not in timings for d in find_differences(a[k], b[k], f"{where}/{k}")
        ]
    if isinstance(a, (list, tuple)):
        pairs = enumerate(zip(a, b, strict=True))
        return [d for i, (x, y) in pairs for d in find_differences(x, y, f"{where}/{i}")]
    return [] if a == b else [f"{where}: {a} != {b}"]


def strip_times(epochs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    times = {"seconds", "images_per_s", "eval_s"}
    return [
        {k: v for k, v in epoch.items() if k not in times and not k.startswith("data_wait")}
        for epoch in epochs
    ]


def read_trace(path: Path) -> dict[int, dict[int, list[int]]]:
    """step -> microbatch -> samples, as they were trained last."""
    trained: dict[int, dict[int, list[int]]] = {}
    for line in path.read_text().splitlines():
        note = json.loads(line)
        trained.setdefault(note["step"], {})[note["part"]] = note["ids"]
    return trained


def stopped_at(out: Path) -> int:
    run = read_run(out)
    assert (run["status"], run["exit_code"]) == ("checkpointed", CHECKPOINTED)
    return int(final_state(out)["step"])
