"""Checks the paths that the flags name, before anything heavy is imported (no torch)."""

from __future__ import annotations

from pathlib import Path

from dataset.errors import UserError
from dataset.federation.pelican import parse_target
from train.config import TrainConfig
from train.data.splits import check_data
from train.run_folder import check_output, require_last


def check_paths(cfg: TrainConfig) -> None:
    """Raises for paths with which the run cannot start."""
    for url in cfg.urls:
        parse_target(url, cfg.federation)
    if cfg.index is not None and "://" not in cfg.index and not Path(cfg.index).is_file():
        raise UserError(f"--index {cfg.index}: no such file; name a TAR.index or its URL")
    if not cfg.urls and not cfg.dummy:
        check_data(Path(cfg.data))
    for flag, folder in (("--index-dir", cfg.index_dir), ("--data-dir", cfg.data_dir)):
        if folder is not None and folder.exists() and not folder.is_dir():
            raise UserError(f"{flag} {folder} is a file; name a folder")
    if cfg.token is not None and not cfg.token.is_file():
        raise UserError(f"--token {cfg.token}: no such file; name one that holds the token")
    if cfg.resumes_last:
        require_last(cfg)
    elif cfg.resume is not None:
        check_checkpoint(cfg.resume)
    elif cfg.evaluate and not (cfg.weights or cfg.pretrained or has_checkpoint(cfg.output)):
        raise nothing_to_evaluate(cfg)
    if cfg.weights is not None:
        check_weights(cfg.weights)
    if cfg.output is not None and not cfg.evaluate:
        check_output(cfg.output)


def has_checkpoint(output: Path | None) -> bool:
    """Whether there is a file named like a checkpoint in the folder of a run."""
    return output is not None and any(output.glob("ckpt/step-*.pt"))


def nothing_to_evaluate(cfg: TrainConfig) -> UserError:
    """The error of -e without a checkpoint: where none was found, and how to name one."""
    fix = "name --weights FILE, --resume FILE or the --output of a run"
    where = f"no checkpoint in {cfg.output}; {fix}" if cfg.output else fix
    return UserError(f"nothing to evaluate: {where}")


def check_checkpoint(path: Path) -> None:
    """Raises if there is no such file."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file in it, such as ckpt/step-*.pt of a run")
    if not path.is_file():
        raise UserError(f"no such checkpoint: {path}; name a file ckpt/step-*.pt of a run")


def check_weights(path: Path) -> None:
    """Raises if there is no such file, or if torch.save cannot have written it."""
    if not path.is_file():
        raise UserError(f"no such weights: {path}; give a .pt file of a state dict or a checkpoint")
    if path.suffix == ".safetensors":
        raise UserError(f"{path}: give a file of torch.save(model.state_dict(), FILE) instead")
