"""The paths that the flags name, looked at before anything heavy is imported (no torch)."""

from __future__ import annotations

import os
from pathlib import Path

from dataset.errors import UserError
from train.config import TrainConfig


def check_paths(cfg: TrainConfig) -> None:
    """Refuses paths with which the run cannot start."""
    if not cfg.dummy and "://" not in cfg.data and not Path(cfg.data).exists():
        fix = "name a folder with train/ and val/, or the tars"
        raise UserError(f"no such data: {cfg.data}; {fix}")
    if cfg.resume is not None and not cfg.resumes_last:
        check_checkpoint(cfg.resume)
    if cfg.weights is not None:
        check_weights(cfg.weights)
    if cfg.output is not None and not cfg.evaluate:
        check_output(cfg.output)


def check_checkpoint(path: Path) -> None:
    """Refuses a name that is no file."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file in it, such as ckpt/step-*.pt of a run")
    if not path.is_file():
        raise UserError(f"no such checkpoint: {path}; name a file ckpt/step-*.pt of a run")


def check_weights(path: Path) -> None:
    """Refuses a name that is no file of torch.save."""
    if not path.is_file():
        raise UserError(f"no such weights: {path}; give a .pt file of a state dict or a checkpoint")
    if path.suffix == ".safetensors":
        raise UserError(f"{path}: give a file of torch.save(model.state_dict(), FILE) instead")


def check_output(output: Path) -> None:
    """Refuses a folder that is none, or that cannot be made."""
    for path in (output, output / "ckpt"):
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is a file, and the run needs a folder there; move it away")
    above = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not above.is_dir():
        raise UserError(f"--output {output}: {above} is a file; name another folder")
    if above != output and not os.access(above, os.W_OK | os.X_OK):
        raise UserError(f"--output {output}: {above} cannot be written to; name another folder")
