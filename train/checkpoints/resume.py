"""What a run continues from: the output's latest checkpoint, a named one, or nothing."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from dataset.errors import CommandError, UserError
from train.checkpoints import checkpoint
from train.config import TrainConfig
from train.paths import nothing_to_evaluate
from train.ranks.comm import Comm
from train.ranks.launch import Launch

log = logging.getLogger("trainyard")


def find_checkpoint(
    cfg: TrainConfig, output: Path, launch: Launch, comm: Comm
) -> checkpoint.State | None:
    """The state to continue from, or None; rank 0 reads it and sends it to the others.

    128 ranks that read 200 MB at once would be 26 GB from the shared disk.
    """
    if cfg.evaluate and cfg.resume is None and (cfg.weights or cfg.pretrained):
        return None  # these weights were asked about, and not the output's
    folder = output / "ckpt"
    path = latest = None
    if launch.is_main:
        path, latest = _load_latest(cfg, folder)
        if cfg.resume is not None and not _is_restart(cfg, latest):
            path, latest = cfg.resume, checkpoint.load_checkpoint(cfg.resume)
    path, state = comm.from_main((path, latest))
    if path is None and cfg.evaluate:
        raise nothing_to_evaluate(cfg)
    if state is not None and cfg.evaluate:
        log.info("evaluating %s, step %d", path, state["step"])
    loaded: checkpoint.State | None = state
    return loaded


def _load_latest(cfg: TrainConfig, folder: Path) -> tuple[Path | None, checkpoint.State | None]:
    try:
        return checkpoint.load_latest(folder)
    except CommandError:
        if cfg.resume is None:
            raise
        return None, None  # --resume may be given because these are damaged


def _is_restart(cfg: TrainConfig, latest: checkpoint.State | None) -> bool:
    """Whether the output already continued from the named file: a requeue repeats the command."""
    if cfg.evaluate or latest is None:
        return False
    return bool(latest.get("resumed_from") == str(cfg.resume))


def choose_share(
    cfg: TrainConfig, state: checkpoint.State | None, *, has_val: bool
) -> tuple[float | None, int]:
    """The share of the images to hold out, and the seed that chooses them.

    -e takes those of the checkpoint's run: it was trained on all other images.
    """
    held = state["identity"].get("val_share") if state is not None and cfg.evaluate else None
    if state is None or held is None or has_val:
        return cfg.val_share, cfg.seed
    if cfg.val_share not in (None, held):
        raise UserError(
            f"--val-share {cfg.val_share:g}: the run of this checkpoint held out {held:g}, and was "
            "trained on the rest; leave the flag out to evaluate on what it held out"
        )
    return held, state["identity"]["seed"]


def refuse_changes(
    state: checkpoint.State, identity: dict[str, Any], cfg: TrainConfig, output: Path
) -> None:
    """Raises for a checkpoint of another run, unless --force is given."""
    automatic = {"precision": cfg.precision, "decoder": cfg.decoder}
    chosen_here = {name for name, wanted in automatic.items() if wanted == "auto"}
    # Before --order all runs were uniform, and before lanes a streamed one had a single lane.
    old, new = ({"order": "uniform", "lanes": 1} | d for d in (state["identity"], identity))
    moved = checkpoint.describe_changes(*({k: d.get(k) for k in chosen_here} for d in (old, new)))
    if moved:  # a grid gives the next attempt another kind of machine
        log.warning("this machine differs from the one before (%s); continuing", moved)
    kept = [{k: v for k, v in d.items() if k not in chosen_here} for d in (old, new)]
    changes = checkpoint.describe_changes(*kept)
    if changes and not cfg.force:
        hint = ""
        if old.get("units") and new.get("units") and old["units"] != new["units"]:
            hint = " (units are cut along the tar's index: --index-dir names the folder of another)"
        raise UserError(
            f"the run in {output} had other settings ({changes}); use those{hint}, a new --output, "
            "or --force to continue anyway"
        )
