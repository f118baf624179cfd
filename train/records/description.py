"""What run.json says about a run before it trains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
import torchvision

from train.device import name_device
from train.prepare import Setup, recipe_values
from train.ranks.batch_system import describe_slot
from train.records.classes import CLASSES_FILE
from train.run_folder import flags_of

NO_VALIDATION = "no validation images: accuracy is not measured"
COMMUNICATION_METHOD = (
    "estimate: what DDP samples of all-reduce time that backward did not cover, times the steps"
)


def describe_run(setup: Setup) -> dict[str, Any]:
    """The fields that are known at the start; a later attempt overwrites them."""
    data = setup.dataset
    config = setup.cfg.as_record() | recipe_values(setup.recipe)
    config |= {
        "precision": setup.placement.precision,
        "microbatch": setup.plan.microbatch,
        "workers": setup.num_workers,
        "threads": torch.get_num_threads(),
        "decoder": setup.decoder.name,
    }
    return {
        "run_id": setup.output.name,
        "config": config,
        "flags": flags_of(setup.cfg),
        "world_size": setup.launch.world_size,
        "num_nodes": setup.launch.num_nodes,
        "device": name_device(setup.placement.device),
        "versions": describe_versions(),
        "commit": current_commit(),
        "host": os.uname().nodename,
        "dataset": {
            "path": data.path if data else None,
            "source": data.kind if data else "dummy",
            "fingerprint": data.fingerprint if data else None,
            "num_train": setup.num_train,
            "num_val": setup.num_val,
            "num_classes": setup.num_classes,
            "classes": CLASSES_FILE if data else None,  # their names, beside this record
            **({"note": NO_VALIDATION} if data and not setup.num_val else {}),
        },
        "communication_method": COMMUNICATION_METHOD,
        "scheduler": describe_slot(os.environ, setup.launch.job),
    }


def describe_versions() -> dict[str, str]:
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "numpy": np.__version__,
        "pillow": PIL.__version__,
    }


def current_commit() -> str | None:
    """The commit of this checkout, with '-dirty' where files differ; None outside of git."""
    root = Path(__file__).resolve().parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None if answer.returncode == 0 else None
