"""The temporary folder of a stream on its node: maps, plan and task; it goes with the run.

A run that is killed leaves its folder behind, and the next run on the node removes it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from dataset.durable import try_lock

PREFIX = "trainyard-stream-"
HELD = "held"  # a file that the run keeps locked
NEW_S = 3600.0  # a younger folder may not be locked yet


class NodeFolder:
    """A new folder of this process, below HTCondor's scratch folder or TMPDIR."""

    def __init__(self) -> None:
        place = Path(os.environ.get("_CONDOR_SCRATCH_DIR") or tempfile.gettempdir())
        _sweep(place)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        self._fd: int | None = _open_held(self.path)
        try_lock(self._fd)

    def close(self) -> None:
        """Removes the folder; may be called again."""
        shutil.rmtree(self.path, ignore_errors=True)
        fd, self._fd = self._fd, None
        if fd is not None:  # only once: the number may be another file's by now
            os.close(fd)


def _open_held(folder: Path) -> int:
    return os.open(folder / HELD, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _sweep(place: Path) -> None:
    """Removes the folders of runs that were killed."""
    for folder in place.glob(f"{PREFIX}*"):
        with suppress(OSError):  # somebody else's, or held: BlockingIOError is one
            found = folder.lstat()
            if found.st_uid == os.geteuid() and time.time() - found.st_mtime > NEW_S:
                _remove_unheld(folder)


def _remove_unheld(folder: Path) -> None:
    fd = _open_held(folder)
    try:
        if try_lock(fd):  # False where there are no locks: then nobody can tell
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(fd)
