"""The folder of a study or search: held by one process at a time; paths relative to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dataset.durable import lock_file
from dataset.errors import PassingError, UserError


@contextmanager
def only_one(folder: Path, waits: bool = False) -> Iterator[bool]:
    """Holds the folder's lock: two starts would submit its trainings twice.

    The value is whether it is locked: False on a file system without locks. `waits`: until the
    other process ends, as do the short ones of a DAG.
    """
    try:
        lock, has_lock = lock_file(folder / ".lock", waits=waits)
    except BlockingIOError:
        raise PassingError(
            f"{folder} is being run by another process; ask for its status"
        ) from None
    try:
        yield has_lock
    finally:
        os.close(lock)


def relative_data(data: str, folder: Path) -> str:
    """DATA as a plan keeps it: a URL unchanged, a path relative to the folder."""
    if not data or "://" in data:
        return data
    if not Path(data).exists():
        raise UserError(f"no such file or folder: {data}; give a data folder or a URL")
    return os.path.relpath(data, folder)


def data_argument(data: str, folder: Path) -> str:
    """DATA of a plan as the trainer takes it, from the current folder."""
    if "://" in data:
        return data
    return from_here(Path(os.path.normpath(folder / data)))


def from_here(path: Path) -> str:
    """A path relative to the current folder, so that records name nothing of this machine."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
