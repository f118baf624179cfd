"""Our own files in a folder, opened so that no file of the user and no other process suffers."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

from dataset.errors import PassingError, UserError

_NOT_A_FILE = (errno.ELOOP, errno.ENXIO)  # a link where none is followed; a socket


def open_own(path: Path, flags: int = os.O_RDWR) -> int:
    """The descriptor of a regular file of ours, made if there is none, and never emptied here.

    A link is not followed: what it leads to is somebody else's. A pipe would block.
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
    """The descriptor of a partial file that no other process writes while it is open.

    The lock of the folder does not suffice: OUT/sub/x is reached with --out OUT and --out OUT/sub.
    """
    while True:
        fd = open_own(part)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise PassingError(f"{part} is being written by another process; try again") from None
        except OSError:
            return fd  # a file system without locks; the folder's lock has said so
        if _is_at(fd, part):
            return fd
        os.close(fd)  # it got its final name a moment ago


def check_absent(path: Path) -> None:
    """Raises unless the final name of a whole file is free, also of a link that leads nowhere."""
    if os.path.lexists(path):
        raise UserError(f"{path} appeared during the transfer; move it away and start again")


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _refuse(path: Path) -> UserError:
    return UserError(f"{path} is in the way: it is no regular file; move it away")
