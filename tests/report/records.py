"""Run folders as the trainer writes them, for the tests of the reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dataset.durable import write_json
from train.records.record import EPOCHS_FILE, PHASES, RUN_FILE, append_line

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "run_results" / "published"
REPLAY = ROOT / "run_results" / "benchmarks" / "osg_week.json"
EXAMPLE = ROOT / "run_results" / "cpu" / "two-core-example"  # README's table
KEMPNER = PUBLISHED / "kempner_a100.csv"


def run_record(run_id: str, num_gpus: int = 1, **changes: Any) -> dict[str, Any]:
    """A run.json of a finished run on `num_gpus` ranks; keys of `config` may be changed too."""
    config = {
        "arch": "resnet18",
        "epochs": 2,
        "batch_size": 32 * num_gpus,
        "lr": 0.1,
        "microbatch": None,
        "recipe": "reference",
        "precision": "fp32",
        "image_size": 64,
        "seed": 0,
        "workers": 1,
    }
    config |= changes.pop("config", {})
    wall_clock_s = changes.pop("wall_clock_s", 100 / num_gpus + 10)
    phases = dict.fromkeys(PHASES, 0.0) | {"startup": 10.0, "compute": wall_clock_s - 10}
    phases |= changes.pop("phases", {})
    record = {
        "schema": 1,
        "run_id": run_id,
        "status": "done",
        "exit_code": 0,
        "attempts": [{"start": 1.0, "end": 1.0 + wall_clock_s, "seconds": wall_clock_s}],
        "config": config,
        "world_size": num_gpus,
        "num_nodes": 1,
        "device": "cpu",
        "versions": {"python": "3.11.7", "torch": "2.15.0"},
        "commit": "abcdef0",
        "host": "node1",
        "dataset": {"path": "data", "fingerprint": "f1", "num_train": 1000, "num_classes": 10},
        "images_trained": 2000,
        "wall_clock_s": wall_clock_s,
        "steady_images_per_s": 2000 / (wall_clock_s - 10),
        "phases": {name: {"mean_s": s, "max_s": s} for name, s in phases.items()},
        "communication_method": "measured by a step without it",
        "result": {"final_acc1": 41.5, "final_acc5": 80.25, "best_acc1": 42.0, "best_epoch": 1},
        "scheduler": {"kind": "none"},
    }
    return record | changes


def write_run(parent: Path, run_id: str, num_gpus: int = 1, **changes: Any) -> Path:
    """A run folder with run.json and two epochs."""
    folder = parent / run_id
    folder.mkdir(parents=True)
    record = run_record(run_id, num_gpus, **changes)
    write_json(folder / RUN_FILE, record)
    for epoch in range(2):
        append_line(folder / EPOCHS_FILE, epoch_record(epoch, float(record["wall_clock_s"]) / 2))
    return folder


def epoch_record(epoch: int, seconds: float) -> dict[str, Any]:
    return {
        "epoch": epoch,
        "step": 31 * (epoch + 1),
        "lr": 0.1,
        "train_loss": 2.3 / (epoch + 1),
        "train_acc1": 20.0 * (epoch + 1),
        "val_loss": 2.2 / (epoch + 1),
        "val_acc1": 20.75 * (epoch + 1),
        "val_acc5": 60.0 + epoch,
        "images": 992,
        "seconds": seconds,
        "images_per_s": 992 / seconds,
        "data_wait_s": 0.1,
        "eval_s": 1.0,
        "samples_dropped": 8,
        "samples_skipped": 0,
    }


def write_raw(folder: Path, record: Any) -> Path:
    """A run.json with whatever content."""
    folder.mkdir(parents=True)
    (folder / RUN_FILE).write_text(record if isinstance(record, str) else json.dumps(record))
    return folder
