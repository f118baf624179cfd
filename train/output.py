"""The folder of a run: given by a flag, found again or new; locked for one run at a time."""

from __future__ import annotations

import logging
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

import torch

from train.config import TrainConfig
from train.device import name_device
from train.last_run import RUNS, find_last, require_last
from train.paths import check_output
from train.ranks.launch import Launch
from train.records.recorder import lock_folder

log = logging.getLogger("trainyard")


def choose_output(cfg: TrainConfig, device: torch.device, launch: Launch) -> str:
    """The run's folder; rank 0 alone finds and locks it."""
    if cfg.resumes_last:
        output = require_last(cfg)
    else:
        output = cfg.output or default_output(device, launch)
    if not cfg.evaluate:
        hold_output(output)
        if cfg.output is None and not output.exists():
            tell_about_folder(cfg, output)
    return str(output)


def tell_about_folder(cfg: TrainConfig, output: Path) -> None:
    """Logs how to continue this run or an earlier one: without --output each start is new."""
    log.info("a new run, since no --output is given; --output %s continues it", output)
    earlier = find_last(cfg)
    if earlier:
        log.info("%s is an unfinished run of this command: --resume last continues it", earlier)


def default_output(device: torch.device, launch: Launch) -> Path:
    """run_results/DEVICE/RUN_ID: a requeued job finds its folder by its own id."""
    words = name_device(device).replace("NVIDIA", "").split()
    run_id = launch.job.id or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    step = os.environ.get("SLURM_STEP_ID", "0")
    if launch.job.scheduler == "slurm" and step.isdecimal() and step != "0":
        run_id = f"{run_id}.{step}"
    return RUNS / "-".join(words) / run_id


def hold_output(output: Path) -> None:
    """Raises if another run writes to the folder, before anything in it is read."""
    check_output(output)
    if output.is_dir():
        with suppress(OSError):  # one that cannot be written is refused later, unless it is done
            lock_folder(output)
