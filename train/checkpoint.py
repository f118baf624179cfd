"""Checkpoints: written beside the training, whole or not at all; the two latest and the best."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import torch

from dataset.errors import UserError

log = logging.getLogger("trainyard")

SCHEMA = 1
NUM_KEPT = 2
BEST_NAME = "best.pt"
State = dict[str, Any]
# What every checkpoint of this schema holds.
KEYS = {"schema", "step", "model", "optimizer", "scaler", "ema", "identity", "microbatch"}
KEYS |= {"epoch_sums", "is_evaluated", "result", "best", "resumed_from"}


class CheckpointWriter:
    """Writes states in a thread; training waits only for the copy to host memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.not_finite = False  # a state held NaN or infinity, and was not written
        self.last_ok = True
        self.last_write_s = 0.0
        self._thread: threading.Thread | None = None
        folder.mkdir(parents=True, exist_ok=True)
        for part in folder.glob("*.part"):  # of a writer that was killed
            part.unlink(missing_ok=True)

    def save(self, state: State, is_best: bool = False) -> None:
        """Starts to write a state; an earlier one that is still being written is waited for."""
        self.wait()
        host_state = copy_to_host(state)
        self._thread = threading.Thread(target=self._write, args=(host_state, is_best))
        self._thread.start()

    def wait(self) -> bool:
        """Whether the last state is durable, once its writing has ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self.last_ok

    def _write(self, state: State, is_best: bool) -> None:
        path = self.folder / file_name(state["step"])
        part = path.with_name(path.name + ".part")
        begin_s = time.monotonic()
        self.last_ok = False
        try:
            if not all_finite(state):
                self.not_finite = True
                return
            with open(part, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            if is_best:  # first: a kill in between must not leave a state whose best is missing
                _link_or_copy(part, self.folder / BEST_NAME)
            part.replace(path)
            _sync_folder(self.folder)
            self.last_ok = True
            self.last_write_s = time.monotonic() - begin_s
            _prune(self.folder, state["step"])
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            _unlink(part)
            log.warning("checkpoint of step %d not written: %s", state["step"], _short(error))


def file_name(step: int) -> str:
    return f"step-{step:09d}.pt"


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, by step."""
    return sorted(p for p in folder.glob("step-*.pt") if re.fullmatch(r"step-\d+\.pt", p.name))


def _prune(folder: Path, step: int) -> None:
    """Leaves this step and the one before; later ones are of a course that was given up."""
    newest = file_name(step)
    later = [path for path in list_checkpoints(folder) if path.name > newest]
    earlier = [path for path in list_checkpoints(folder) if path.name <= newest]
    for path in later + earlier[:-NUM_KEPT]:
        _unlink(path)


def load_latest(folder: Path) -> State | None:
    """The newest checkpoint that can be read, or None in a fresh folder."""
    for path in reversed(list_checkpoints(folder)):
        try:
            return load_checkpoint(path)
        except UserError as error:  # the disk damaged it after it was whole
            log.warning("%s; trying the one before", error)
    if list_checkpoints(folder):
        raise UserError(f"no checkpoint in {folder} can be read; move it away to start anew")
    return None


def load_checkpoint(path: Path) -> State:
    """A checkpoint by its name; a missing or foreign file is an error, never a fresh start."""
    if not path.is_file():
        raise UserError(f"no such checkpoint: {path}; name a file ckpt/step-*.pt of a run")
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes are read as instructions, and raise what they like
        raise UserError(f"{path} cannot be read as a checkpoint: {_short(error)}") from None
    schema = state.get("schema") if isinstance(state, dict) else None
    if type(schema) is int and schema > SCHEMA:
        raise UserError(f"{path} has schema {schema}, this code reads {SCHEMA}; update it")
    if type(schema) is not int or not state.keys() >= KEYS:
        raise UserError(f"{path} is not a checkpoint of this trainer; --weights takes state dicts")
    whole: State = state
    return whole


def describe_changes(old: dict[str, Any], new: dict[str, Any]) -> str:
    """What differs between two identities of a run, as 'name: old -> new', or an empty string."""
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return ", ".join(f"{name}: {old.get(name)} -> {new.get(name)}" for name in names)


def copy_to_host(value: Any) -> Any:
    """A deep copy with every tensor in host memory: training may go on changing the originals."""
    if torch.is_tensor(value):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copy_to_host(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copy_to_host(item) for item in value)
    return value


def all_finite(value: Any) -> bool:
    """Whether no floating-point tensor in the state holds NaN or infinity."""
    if torch.is_tensor(value):
        return not value.is_floating_point() or bool(torch.isfinite(value).all())
    if isinstance(value, dict):
        return all(all_finite(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return all(all_finite(item) for item in value)
    return True


def _link_or_copy(source: Path, target: Path) -> None:
    part = target.with_name(target.name + ".part")
    _unlink(part)
    try:
        os.link(source, part)
    except OSError:  # a filesystem without hard links
        shutil.copyfile(source, part)
    part.replace(target)


def _unlink(path: Path) -> None:
    """Removes a file that is in the way; one that cannot be removed is no reason to stop."""
    with contextlib.suppress(OSError):
        path.unlink()


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _short(error: BaseException) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:200]
