"""Checkpoints, written in the background and atomically; keeps the two latest and the best."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dataset.durable import sync
from dataset.errors import CommandError, DataError, UserError, describe_os_error
from train.checkpoints.snapshot import Snapshot
from train.checkpoints.torch_file import find_damage, read_torch_file, write_torch_file
from train.paths import check_checkpoint

log = logging.getLogger("trainyard")

SCHEMA = 1
NUM_KEPT = 2
BEST_NAME = "best.pt"
State = dict[str, Any]
# The fields of every checkpoint of this schema, and their types.
FIELDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("schema", "step", "microbatch"), (int,)),
    **dict.fromkeys(("model", "optimizer", "scaler", "ema"), (dict,)),
    **dict.fromkeys(("identity", "epoch_sums", "result", "best"), (dict,)),
    "is_evaluated": (bool,),
    "resumed_from": (str, type(None)),
}


class CheckpointWriter:
    """Writes states in a thread; training waits only for a copy (on a GPU, within its memory)."""

    def __init__(self, folder: Path, first_step: int | None = None) -> None:
        """first_step: where this attempt begins. Later files are damaged, or no longer continued.

        They are removed after the next checkpoint: else a damaged one would be among the latest.
        """
        self.folder = folder
        files = list_checkpoints(folder) if first_step is not None else []
        self._given_up = [p for p in files if p.name > file_name(first_step or 0)]
        self.not_finite = False  # a state held NaN or infinity, and was not written
        self.last_ok = True
        self.last_write_s = 0.0
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        folder.mkdir(parents=True, exist_ok=True)
        for part in folder.glob("*.part"):  # of a writer that was killed
            part.unlink(missing_ok=True)

    def save(self, state: State, is_best: bool = False, records: Sequence[Path] = ()) -> None:
        """Starts to write a state, after waiting for the one before.

        The records of the epochs before this state are synced to the disk first.
        """
        self.wait()
        arguments = (Snapshot(state), state["step"], is_best, records)
        self._thread = threading.Thread(target=self._write, args=arguments)
        self._thread.start()

    def wait(self) -> bool:
        """Waits for the running write; True if the last state is safely on the disk."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            raise self._failure
        return self.last_ok

    def _write(self, snapshot: Snapshot, step: int, is_best: bool, records: Sequence[Path]) -> None:
        path = self.folder / file_name(step)
        part = path.with_name(path.name + ".part")
        begin_s = time.monotonic()
        self.last_ok = False
        try:
            state = snapshot.fetch()
            if not all_finite(state):
                self.not_finite = True
                return
            write_torch_file(part, state)
            for record in records:
                sync(record)
            if is_best:  # before the rename: no checkpoint may say it is the best without best.pt
                _link_or_copy(part, self.folder / BEST_NAME)
            part.replace(path)
            sync(self.folder)
            self.last_ok = True
            self.last_write_s = time.monotonic() - begin_s
            for old in self._given_up:
                if old != path:
                    _unlink(old)
            self._given_up = []
            _prune(self.folder, step)
        except OSError as error:
            _unlink(part)
            reason = describe_os_error(error) or str(error)
            log.warning("checkpoint of step %d not written: %s", step, reason)
        except Exception as error:  # of the device: raised again in wait()
            self._failure = error


def file_name(step: int) -> str:
    return f"step-{step:09d}.pt"


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, by step."""
    return sorted(p for p in folder.glob("step-*.pt") if re.fullmatch(r"step-\d+\.pt", p.name))


def _prune(folder: Path, step: int) -> None:
    """Keeps this step and the one before; later ones belong to an attempt that was given up."""
    newest = file_name(step)
    later = [path for path in list_checkpoints(folder) if path.name > newest]
    earlier = [path for path in list_checkpoints(folder) if path.name <= newest]
    for path in later + earlier[:-NUM_KEPT]:
        _unlink(path)


def load_latest(folder: Path) -> tuple[Path, State] | tuple[None, None]:
    """The newest checkpoint that is whole, and its file; (None, None) in a fresh folder."""
    for path in reversed(list_checkpoints(folder)):
        try:
            return path, load_checkpoint(path)
        except CommandError as error:  # damaged on the disk after it was written
            log.warning("%s: trying the one before", error)
    if list_checkpoints(folder):
        best = folder / BEST_NAME
        hint = f"--resume {best} continues from the best epoch, or " if _is_whole(best) else ""
        raise DataError(f"no checkpoint in {folder} is intact; {hint}move it away to start anew")
    return None, None


def _is_whole(path: Path) -> bool:
    try:
        return path.is_file() and not find_damage(path)
    except OSError:
        return False


def load_checkpoint(path: Path) -> State:
    """A checkpoint by its name; raises for a missing or foreign file, and never starts afresh."""
    check_checkpoint(path)
    state: Any = read_torch_file(path, must_be_zip=True)
    schema = state.get("schema") if isinstance(state, dict) else None
    if type(schema) is int and schema > SCHEMA:
        raise UserError(f"{path} has schema {schema}, this code reads {SCHEMA}; update it")
    if type(schema) is not int or not state.keys() >= FIELDS.keys():
        raise UserError(f"{path} is not a checkpoint of this trainer; --weights takes state dicts")
    for name, types in FIELDS.items():
        if not _fits(state[name], types):
            seen = f"{name} is {str(state[name])[:50]!r}"
            raise UserError(f"{path} is not a checkpoint of this trainer: {seen}")
    whole: State = state
    return whole


def _fits(value: Any, types: tuple[type, ...]) -> bool:
    """Whether a field has one of its types; an int must be a count, and bool is not an int."""
    if types == (int,):
        return type(value) is int and value >= 0
    return isinstance(value, types)


def describe_changes(old: dict[str, Any], new: dict[str, Any]) -> str:
    """What differs between two identities of a run, as 'name: old -> new', or an empty string."""
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return ", ".join(f"{name}: {old.get(name)} -> {new.get(name)}" for name in names)


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
