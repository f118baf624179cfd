"""The output folder: its lock, its free space, and the record of what was fetched and verified."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dataset.errors import PassingError, UserError
from dataset.journal import part_path

log = logging.getLogger("trainyard.fetch")

RECORD = "fetched.jsonl"
LOCK = ".fetch.lock"
SPARE_BYTES = 16 << 20  # for the journal and the file system's own needs
WAIT_S = 0.2


@contextmanager
def lock_folder(folder: Path, wait_s: float) -> Iterator[None]:
    """Holds the folder for one fetch at a time; another one waits, and then finds the files."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES):
            raise
        yield  # nothing can be written here, but all may be here already
        return
    try:
        if not _try_lock(fd):
            holder = os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process"
            log.info("%s is being filled by %s; waiting", folder, holder)
            deadline = time.monotonic() + wait_s
            while not _try_lock(fd):
                if time.monotonic() >= deadline:
                    raise PassingError(f"{folder} is still being filled by {holder}; try later")
                time.sleep(WAIT_S)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
        yield
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks, as Lustre may be mounted
        log.warning("no locks here (%s): do not start two fetches into one folder", error)
    return True


def check_space(path: Path, size: int) -> None:
    """Raises unless the rest of the object fits on the disk: said before the transfer starts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = part_path(path)
    held = part.stat().st_blocks * 512 if part.exists() else 0
    disk = os.statvfs(path.parent)
    free = disk.f_bavail * disk.f_frsize
    needed = size - min(held, size) + SPARE_BYTES
    if needed > free:
        raise UserError(
            f"{path.name} needs {needed / 1e9:.2f} GB more in {path.parent}, where "
            f"{free / 1e9:.2f} GB are free; free some space or choose another --out"
        )


class Ledger:
    """fetched.jsonl of an output folder: a line for every file that is whole, last one counts."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._records = _read_records(root / RECORD)

    def find(self, path: Path, identity: str) -> dict[str, Any] | None:
        """The record of a file that was fetched from there and not touched since."""
        record = self._records.get(self.name_of(path))
        if record is None:
            return None
        try:
            stat = path.stat()
        except OSError:
            return None
        known = (record.get("object"), record.get("size"), record.get("mtime_ns"))
        return record if known == (identity, stat.st_size, stat.st_mtime_ns) else None

    def make(
        self, path: Path, identity: str, verified: Sequence[str], digests: Mapping[str, str]
    ) -> dict[str, Any]:
        """The record of a whole file, with what tells later whether it was touched."""
        stat = path.stat()
        return {
            "name": self.name_of(path),
            "object": identity,
            "size": stat.st_size,
            "mtime_ns": stat.st_mtime_ns,
            "verified": list(verified),
            "digests": dict(digests),
        }

    def add(self, records: Sequence[dict[str, Any]]) -> None:
        """Appends lines in one write; a torn line of a killed process before them stays alone."""
        self._records.update({record["name"]: record for record in records})
        data = "".join("\n" + json.dumps(record) for record in records) + "\n"
        fd = os.open(self._root / RECORD, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(fd, data.encode())
        finally:
            os.close(fd)

    def name_of(self, path: Path) -> str:
        """How a file below the folder is called in the record."""
        return path.relative_to(self._root).as_posix()


def _read_records(path: Path) -> dict[str, dict[str, Any]]:
    records: dict[str, dict[str, Any]] = {}
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return records
    for line in lines:
        try:
            record = json.loads(line)
            records[record["name"]] = record
        except (ValueError, KeyError, TypeError):
            continue
    return records
