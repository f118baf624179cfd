"""Files that a kill cannot spoil: one holder at a time, whole or not there, and space for them."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # as Lustre may answer


def try_lock(fd: int, waits: bool = False) -> bool:
    """Whether the file is locked now; False on a file system without locks.

    BlockingIOError when another process has it, unless one waits for it. The kernel gives a lock
    back, however one ends.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def lock_file(
    path: Path, opener: Callable[[Path], int] = _open_lock, waits: bool = False
) -> tuple[int, bool]:
    """(the descriptor of the file at this path, whether it is locked); as try_lock otherwise.

    The one before may rename or remove the file between our opening and our locking: once more.
    """
    while True:
        fd = opener(path)
        try:
            has_lock = try_lock(fd, waits)
            if not has_lock or _is_at(fd, path):
                return fd, has_lock
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


@contextmanager
def writing_whole(
    path: Path, is_synced: bool = True, is_shared: bool = False
) -> Iterator[BinaryIO]:
    """A file that gets its final name when it is whole.

    Until then it is NAME.part; `is_shared` gives it a name of its own, where others may write the
    same file at the same time.
    """
    own = f".{secrets.token_hex(4)}" if is_shared else ""
    part = path.with_name(f"{path.name}{own}.part")
    try:
        with open(part, "wb") as file:
            yield file
            file.flush()
            if is_synced:
                os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:  # a write and an fsync do not name the file, nor so the full disk
        error.filename = error.filename or str(path)
        raise
    finally:
        part.unlink(missing_ok=True)


def write_json(path: Path, value: Mapping[str, Any], is_synced: bool = True) -> None:
    """Writes the value: a reader sees the old file or the new one."""
    with writing_whole(path, is_synced) as file:
        file.write(json.dumps(value, indent=1, allow_nan=False).encode() + b"\n")


def write_all(fd: int, data: bytes | memoryview) -> None:
    """All bytes: one write, as a rule; on a disk that fills up the second one says so."""
    num = os.write(fd, data)
    while num < len(data):
        num += os.write(fd, data[num:])


def write_at(fd: int, view: memoryview, offset: int) -> None:
    """All bytes of the view at the offset."""
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def sync(path: Path) -> None:
    """Brings a file, or the names in a folder, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Room(NamedTuple):
    """What a file system has left for us."""

    num_bytes: int
    num_files: int | None  # None where there is no limit
    block: int  # bytes: a file takes whole ones


def find_room(folder: Path) -> Room:
    """What the file system of a folder has left."""
    disk = os.statvfs(folder)
    block = disk.f_frsize or 4096
    return Room(disk.f_bavail * block, disk.f_favail if disk.f_files else None, block)
