"""The output folder: its lock, its free space, and the record of what was fetched and verified."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dataset.durable import find_room, try_lock, write_all
from dataset.errors import PassingError, UserError
from dataset.own_names import LOCK, RECORD, list_units, part_path
from dataset.redaction import redact_all
from dataset.untrusted import check_count, check_text, parse_json

log = logging.getLogger("trainyard.fetch")

HOLDER = "process "  # how the text in a lock begins
_RECORD_START = b'{"name":'  # and a record: a user may have a file of that name
SPARE_BYTES = 16 << 20  # for the journal and the file system's own needs
WAIT_S = 0.2
MAX_HOLDER = 400
DYING_S = 2.0  # a job that was just killed keeps its lock for a moment
PLANNING = "planning a stream"  # what a folder is held for while a stream is planned, for seconds


def make_folder(folder: Path) -> None:
    """Makes the folder and those above it, unless they are there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UserError(f"{folder} exists and is not a folder; choose another --out") from None


@contextmanager
def lock_folder(folder: Path, wait_s: float) -> Iterator[None]:
    """Holds the folder for one fetch at a time; another one waits, and then finds the files."""

    def wait(fd: int) -> None:
        holder = _read_holder(fd)
        log.info("%s is being filled by %s; waiting", folder, holder)
        if not _lock_within(fd, wait_s):
            raise PassingError(f"{folder} is still being filled by {holder}; try later")

    with _holding(folder, wait):
        yield


class FolderHeld(UserError):
    """Another process fills the folder: a fetch, which names no purpose, or a stream."""

    def __init__(self, folder: Path, holder: str) -> None:
        super().__init__(
            f"{folder} is being filled by {holder}; wait for its end, or choose another --data-dir"
        )
        self.holder, self.is_fetch = holder, not holder.endswith(")")


@contextmanager
def take_folder(folder: Path, purpose: str) -> Iterator[None]:
    """Holds the folder; raises FolderHeld if another process has it for more than a plan."""

    def refuse(fd: int) -> None:
        while not _lock_within(fd, DYING_S):
            holder = _read_holder(fd)
            if not holder.endswith(f"({PLANNING})"):
                raise FolderHeld(folder, holder)

    with _holding(folder, refuse, f" ({purpose})"):
        yield


@contextmanager
def _holding(folder: Path, meet_other: Callable[[int], None], purpose: str = "") -> Iterator[None]:
    make_folder(folder)
    try:
        fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES):
            raise
        yield  # read-only, but everything may be here already
        return
    try:
        if not _try_lock(fd):
            meet_other(fd)
        is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        if not is_file or os.pread(fd, len(HOLDER), 0) not in (b"", HOLDER.encode()):
            raise UserError(f"{folder / LOCK} is not a lock of this command; choose another --out")
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{HOLDER}{os.getpid()} on {os.uname().nodename}{purpose}".encode(), 0)
        yield
    finally:
        os.close(fd)


def _read_holder(fd: int) -> str:
    return os.pread(fd, MAX_HOLDER, 0).decode(errors="replace").strip() or "another process"


def _lock_within(fd: int, wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while not _try_lock(fd):
        if time.monotonic() >= deadline:
            return False
        time.sleep(WAIT_S)
    return True


def _try_lock(fd: int) -> bool:
    try:
        if not try_lock(fd):
            log.warning("no file locks here: do not start two fetches into one folder")
    except BlockingIOError:
        return False
    return True


def check_space(path: Path, size: int) -> None:
    """Raises, before the transfer starts, unless the rest of the object fits on the disk."""
    _check_free(path.parent, path.name, size - min(_held_bytes(path), size))


def check_space_of_all(folder: Path, files: Iterable[tuple[Path, int]]) -> None:
    """Raises unless the missing part of all (path, size) fits, each in whole disk blocks."""
    block = find_room(folder).block
    needed = 0
    for path, size in files:
        on_disk = -(-size // block) * block
        needed += on_disk - min(_held_bytes(path), on_disk)
    _check_free(folder, "what is missing", needed)


def _held_bytes(path: Path) -> int:
    """Bytes on the disk that an earlier start's partial file occupies, or units that go before."""
    num_bytes = 0
    for file in (part_path(path), *list_units(path)):
        with suppress(FileNotFoundError, NotADirectoryError):
            num_bytes += file.stat().st_blocks * 512
    return num_bytes


class NoSpace(UserError):
    """The object is larger than the free space, if the size that a server gave is right."""


def _check_free(folder: Path, name: str, num_bytes: int) -> None:
    free = find_room(folder).num_bytes
    needed = num_bytes + SPARE_BYTES
    if needed > free:
        raise NoSpace(
            f"{name} needs {needed / 1e9:.2f} GB more in {folder}, where "
            f"{free / 1e9:.2f} GB are free; free some space or choose another folder"
        )


class Ledger:
    """fetched.jsonl of an output folder: a line per complete file; the last line of a name counts.

    With `is_kept` False nothing is read and nothing is written.
    """

    def __init__(self, root: Path, is_kept: bool = True) -> None:
        self._root = root
        self._is_kept = is_kept
        self._records = _read_records(root / RECORD) if is_kept else {}
        self._fd: int | None = None  # while it is held open
        self._lock = threading.Lock()

    def knows(self, path: Path) -> bool:
        """Whether a file of that name was fetched, even if it was changed since."""
        return self.name_of(path) in self._records

    def find(self, path: Path, identity: str) -> dict[str, Any] | None:
        """The record of a file that was fetched from there and not changed since."""
        record = self._records.get(self.name_of(path))
        if record is None:
            return None
        try:
            stat = path.stat()
        except OSError:
            return None
        known = (record.get("object"), record.get("size"), record.get("mtime_ns"))
        return record if known == (identity, stat.st_size, stat.st_mtime_ns) else None

    def vouches_for(self, path: Path) -> bool:
        """Whether a file was fetched, from anywhere, and not changed since."""
        record = self._records.get(self.name_of(path))
        return record is not None and self.find(path, str(record.get("object"))) is not None

    def make(
        self, path: Path, identity: str, verified: Sequence[str], digests: Mapping[str, str]
    ) -> dict[str, Any]:
        """The record of a complete file, with its size and time, to notice later changes."""
        stat = path.stat()
        return {
            "name": self.name_of(path),
            "object": identity,
            "size": stat.st_size,
            "mtime_ns": stat.st_mtime_ns,
            "verified": redact_all(verified),
            "digests": dict(digests),
        }

    @contextmanager
    def hold_open(self) -> Iterator[None]:
        """Keeps the file open for many lines: on a network file system every close is slow."""
        self._fd = self._open()
        try:
            yield
        finally:
            with self._lock:
                os.close(self._fd)
                self._fd = None

    def add(self, records: Sequence[dict[str, Any]]) -> None:
        """Appends lines in one write that begins with a newline, to end a torn line before it."""
        self._records.update({record["name"]: record for record in records})
        if not self._is_kept:
            return
        data = "".join("\n" + json.dumps(record) for record in records) + "\n"
        with self._lock:
            fd = self._open() if self._fd is None else self._fd
            try:
                write_all(fd, data.encode())
            finally:
                if fd != self._fd:
                    os.close(fd)

    def add_before_rename(
        self, path: Path, identity: str, verified: Sequence[str], digests: Mapping[str, str]
    ) -> None:
        """Records a complete partial file under its final name, which it gets next.

        In this order a kill in between leaves no file without its record.
        """
        record = self.make(part_path(path), identity, verified, digests)
        self.add([{**record, "name": self.name_of(path)}])

    def _open(self) -> int:
        return os.open(self._root / RECORD, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def name_of(self, path: Path) -> str:
        """The name of a file below the folder in the record."""
        return path.relative_to(self._root).as_posix()


def _read_records(path: Path) -> dict[str, dict[str, Any]]:
    records: dict[str, dict[str, Any]] = {}
    if not os.path.lexists(path):
        return records
    data = path.read_bytes() if path.is_file() else b"no file"  # a pipe would block
    first_line = data.lstrip().partition(b"\n")[0]  # it may be torn
    if not _RECORD_START.startswith(first_line[: len(_RECORD_START)]):
        raise UserError(f"{path} is not a record of a fetch; move it away or choose another --out")
    for line in data.splitlines():
        try:
            record = parse_json(line)
            _check_record(record)
            records[record["name"]] = record
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return records


def _check_record(record: Any) -> None:
    """Raises an error of some kind unless a line has the fields of a record."""
    check_text(record["name"])
    check_count(record["size"])
    for text in (*record.get("verified", ()), *record.get("digests", {}).values()):
        check_text(text)
