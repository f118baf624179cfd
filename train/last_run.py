"""Runs without an --output: finds the one that the same command should continue (no torch)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dataset.errors import CommandError, UserError
from train.config import TrainConfig
from train.records.record import RUN_FILE, read_run
from train.records.recorder import lock_folder

RUNS = Path("run_results")  # RUNS/DEVICE/RUN_ID is the default --output
# The flags that say what is trained; the others may differ between two starts of one run.
_WHAT = (
    *("data", "arch", "epochs", "batch_size", "microbatch", "recipe", "lr", "momentum", "wd"),
    *("warmup_epochs", "label_smoothing", "lars_eta", "lars_eps", "ema", "image_size", "seed"),
    *("precision", "decoder", "dummy", "pretrained", "weights"),
)


def flags_of(cfg: TrainConfig) -> dict[str, Any]:
    """The flags that decide whether two commands are the same run, as in run.json."""
    flags = {name: value for name, value in cfg.as_record().items() if name in _WHAT}
    # Bytes of a path that are not UTF-8 would not survive JSON.
    return {k: _escape(v) if isinstance(v, str) else v for k, v in flags.items()}


def _escape(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def require_last(cfg: TrainConfig) -> Path:
    """The folder that --resume last means."""
    folder = find_last(cfg)
    if folder is None:
        raise UserError(
            f"--resume last: no unfinished run of this command in {RUNS}/ has a checkpoint; "
            "leave it out to start one"
        )
    return folder


def find_last(cfg: TrainConfig) -> Path | None:
    """The newest run of the same command that is not done, has a checkpoint and is not running."""
    found = []
    for file in RUNS.glob(f"*/*/{RUN_FILE}"):
        try:
            run = read_run(file.parent)
            begin = float(run["attempts"][-1]["start"])
        except (CommandError, OSError, LookupError, TypeError, ValueError):
            continue  # somebody else's file
        if run.get("status") != "done" and _same(run.get("flags"), flags_of(cfg)):
            found.append((begin, file.parent))
    for _, folder in sorted(found, reverse=True):
        if any(folder.glob("ckpt/step-*.pt")) and not _is_running(folder):
            return folder
    return None


def _same(recorded: object, flags: dict[str, Any]) -> bool:
    """Whether two commands are the same run; DATA is a path as it was given, from this folder."""
    return isinstance(recorded, dict) and _place(recorded) == _place(flags)


def _place(flags: dict[str, Any]) -> dict[str, Any]:
    return {**flags, "data": Path(str(flags.get("data"))).absolute()}


def _is_running(folder: Path) -> bool:
    try:
        fd = lock_folder(folder)
    except UserError:
        return True
    except OSError:  # not ours to write
        return False
    if fd is not None:
        os.close(fd)
    return False
