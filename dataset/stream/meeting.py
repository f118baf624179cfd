"""Where the processes of a node find each other's stream: a small file in the folder it goes to.

Who comes first opens the stream and keeps its fetcher; the others read its maps, for as long as it
lives. Its life is a lock of the kernel, so that a kill ends it too.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dataset.durable import try_lock
from dataset.fetch.ledger import make_folder
from dataset.own_names import STREAM
from dataset.stream.node_folder import PREFIX

log = logging.getLogger("trainyard.fetch")


_kept: dict[Path, tuple[int, int]] = {}  # the process that keeps a stream, and its lock


class Owner:
    """The process that keeps the fetcher of a stream: every reader can tell whether it does.

    It holds a lock that forks do not inherit. Closing any descriptor of the file would give it
    back, so the owner itself does not open the file again.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "owner"

    @classmethod
    def become(cls, folder: Path) -> Owner:
        """This process keeps it from now on."""
        owner = cls(folder)
        fd = os.open(owner._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with suppress(OSError):  # a file system without locks
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _kept[owner._path] = (os.getpid(), fd)
        return owner

    @property
    def is_me(self) -> bool:
        """Whether this process keeps the fetcher; a fork of it does not."""
        return _kept.get(self._path, (0, 0))[0] == os.getpid()

    def is_alive(self) -> bool:
        """Whether somebody keeps the fetcher."""
        if self.is_me:
            return True
        try:
            fd = os.open(self._path, os.O_RDWR)
        except OSError:  # removed by the owner
            return False
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(fd)
        return False

    def resign(self) -> None:
        """This process keeps it no more."""
        if self.is_me:
            os.close(_kept.pop(self._path)[1])


class Meeting:
    """The file in which a stream is told of; the processes take turns."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd  # None: the folder cannot be written to, so nothing streams there

    def find(self, url: str) -> Path | None:
        """The folder of a stream of this URL that is kept; removes what a killed process left."""
        if self._fd is None:
            return None
        try:
            told = json.loads(os.pread(self._fd, 1 << 16, 0) or b"{}")
            folder = Path(told["folder"])
            if told["machine"] != os.uname().nodename or folder.stat().st_uid != os.geteuid():
                return None
        except (ValueError, KeyError, TypeError, OSError):
            return None
        if not Owner(folder).is_alive():
            if folder.name.startswith(PREFIX):
                shutil.rmtree(folder, ignore_errors=True)
            return None
        return folder if told.get("url") == _hash(url) else None

    def tell(self, url: str, folder: Path) -> None:
        """The stream of this URL is in that folder."""
        if self._fd is None:
            return
        told = {"machine": os.uname().nodename, "folder": str(folder), "url": _hash(url)}
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(told).encode(), 0)


@contextmanager
def meet(data_dir: Path) -> Iterator[Meeting]:
    """Holds the file, as long as this process opens a stream or fetches into the folder."""
    make_folder(data_dir)
    try:
        fd = os.open(data_dir / STREAM, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES):
            raise
        yield Meeting(None)  # everything may be here already
        return
    try:
        try:
            try_lock(fd)
        except BlockingIOError:
            log.info("another process opens the data in %s; waiting", data_dir)
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield Meeting(fd)
    finally:
        os.close(fd)


def _hash(url: str) -> str:
    """Of a URL, which may hold a secret."""
    return hashlib.sha256(url.encode()).hexdigest()
