"""Opens our own files in a folder without harm to a user's files or to other processes."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from dataset.durable import lock_file
from dataset.errors import PassingError, UserError

_NOT_A_FILE = (errno.ELOOP, errno.ENXIO)  # a link where none is followed; a socket


def open_own(path: Path, flags: int = os.O_RDWR) -> int:
    """The descriptor of a regular file of ours, created if missing, never truncated here.

    Links are not followed: what they lead to is not ours. A pipe would block.
    """
    try:
        fd = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        if error.errno in _NOT_A_FILE:
            raise _refuse(path) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _refuse(path)
    return fd


def hold_part(part: Path) -> int:
    """The descriptor of a partial file, locked against other processes while it is open.

    The folder's lock is not enough: OUT/sub/x can be reached with --out OUT and --out OUT/sub.
    """
    try:
        return lock_file(part, open_own)[0]  # without locks: the folder's lock has logged that
    except BlockingIOError:
        raise PassingError(f"{part} is being written by another process; try again") from None


def check_absent(path: Path) -> None:
    """Raises if something has the final name of a complete file, even a broken link."""
    if os.path.lexists(path):
        raise UserError(f"{path} appeared during the transfer; move it away and start again")


def _refuse(path: Path) -> UserError:
    return UserError(f"{path} is in the way: it is not a regular file; move it away")
