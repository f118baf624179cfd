"""The folder of a run: given, found again or new, and locked for one run at a time (no torch)."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from dataset.errors import CommandError, UserError
from train.config import TrainConfig
from train.ranks.launch import Launch
from train.records.record import RUN_FILE, read_run

log = logging.getLogger("trainyard")

RUNS = Path("run_results")  # RUNS/DEVICE/RUN_ID is the default --output
LOCK_FILE = ".lock"
# The flags that say what is trained; the others may differ between two starts of one run.
_WHAT = (
    *("data", "arch", "epochs", "batch_size", "microbatch", "recipe", "lr", "momentum", "wd"),
    *("warmup_epochs", "label_smoothing", "lars_eta", "lars_eps", "ema", "image_size", "seed"),
    *("precision", "decoder", "order", "dummy", "pretrained", "weights"),
    *("freeze", "backbone_lr_scale", "val_share"),
)
# What the records from before there was such a flag mean.
_BEFORE = {"order": "auto", "freeze": False, "backbone_lr_scale": 1.0, "val_share": None}


def choose_output(cfg: TrainConfig, device: str, launch: Launch) -> str:
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


def default_output(device: str, launch: Launch) -> Path:
    """run_results/DEVICE/RUN_ID: a requeued job finds its folder by its own id."""
    words = device.replace("NVIDIA", "").split()
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


def check_output(output: Path) -> None:
    """Raises if the path is not a folder and cannot become one."""
    for path in (output, output / "ckpt"):
        if path.is_symlink() and not path.exists():
            raise UserError(f"{path} is a broken link; fix it, or name another --output")
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is a file, and the run needs a folder there; move it away")
    above = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not above.is_dir():
        raise UserError(f"--output {output}: {above} is a file; name another folder")
    if above != output and not os.access(above, os.W_OK | os.X_OK):
        raise UserError(f"--output {output}: {above} cannot be written to; name another folder")


def lock_folder(folder: Path) -> None:
    """Locks the folder until this process ends; two runs in one would overwrite each other.

    The lock belongs to the process (lockf), and its file stays open. With flock the loader's
    workers would hold it for some seconds after a kill, and block the next start.
    """
    fd = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows either
        os.close(fd)
        raise UserError(f"another run writes to {folder}; wait, or use another --output") from None
    except OSError:  # a filesystem without locks
        os.close(fd)


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
    return {**_BEFORE, **flags, "data": Path(str(flags.get("data"))).absolute()}


def _is_running(folder: Path) -> bool:
    """Whether another process holds the folder; one that never held a run has no lock."""
    try:
        fd = os.open(folder / LOCK_FILE, os.O_RDWR)
    except OSError:  # not there, or not ours to write
        return False
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except (BlockingIOError, PermissionError):
        return True
    except OSError:  # a filesystem without locks
        return False
    finally:
        os.close(fd)
