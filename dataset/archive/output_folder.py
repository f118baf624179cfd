"""The folder that classes are extracted into: locked, staged, resumed, and marked when done."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from dataset.durable import lock_file, write_json
from dataset.errors import DataError, PassingError, UserError
from dataset.untrusted import parse_json

_log = logging.getLogger("trainyard.extract")
MAX_MARKER_BYTES = 64 << 20

Sizes = Mapping[bytes, int]  # file name -> bytes of it


class OutputFolder:
    """DIR/train or DIR/val while it is being filled.

    Beside it, `.train.extracting` holds what is not complete: `archive.json` (whose classes these
    are), a folder for each run, and `whole`, with classes that wait for the archive's checksum. A
    class is renamed into DIR/train when it is whole. In the end `.train.extracted.json` says so,
    with the number of images of every class, and the staging folder is removed.
    """

    def __init__(self, output: Path, split: str) -> None:
        self.final = (output / split).resolve()
        self.marker = self.final.with_name(f".{split}.extracted.json")
        beside = self.final.with_name(_staging_name(split))
        is_mount = self.final.exists() and _device(self.final) != _device(self.final.parent)
        self._staging = self.final / beside.name if is_mount else beside
        self._whole = self._staging / "whole"
        self.run = self._staging / f"run-{secrets.token_hex(4)}"
        self._lock_fd = -1
        self._has_lock = True

    def __enter__(self) -> OutputFolder:
        try:
            self.final.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise UserError(f"{self.final} is a file; choose another --output_dir") from None
        self._lock()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        shutil.rmtree(self.run, ignore_errors=True)  # what is not whole; room on a full disk
        if error is not None:  # leave nothing behind that was never used
            with suppress(OSError):
                if not self._state_path.exists():
                    shutil.rmtree(self._staging)
                    self.final.rmdir()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    @property
    def _state_path(self) -> Path:
        return self._staging / "archive.json"

    def _lock(self) -> None:
        """Locks the folder for this process; the kernel unlocks it however the process ends."""
        path = self._staging / "lock"
        while True:
            self._staging.mkdir(parents=True, exist_ok=True)
            try:
                self._lock_fd, self._has_lock = lock_file(path)
                break
            except FileNotFoundError:
                continue  # the run before has just finished and removed the staging folder
            except BlockingIOError:
                raise PassingError(
                    f"another process is extracting into {self.final}; run this again when it ends"
                ) from None
        if not self._has_lock:
            _log.warning("no file locks on %s: do not start two extractions into it", self.final)

    def take_up(self, archive: Mapping[str, Any], recheck: bool) -> dict[str, Any] | None:
        """The marker's facts if this archive was extracted here and all its images still exist.

        If they do not, or for a recheck, the marker is removed: the size of every file is then
        compared, as after a kill.
        """
        facts = _read_json(self.marker)
        if not facts:
            return None
        self._check_same(facts.get("archive"), archive)
        damaged = None if recheck else self._find_damaged(facts["classes"])
        if damaged is not None:
            _log.warning("%s is no longer complete; it is extracted again", damaged)
        if recheck or damaged is not None:
            _write_json(self._state_path, {"archive": dict(archive)})
            self.marker.unlink()
            return None
        shutil.rmtree(self._staging, ignore_errors=True)
        return facts

    def _find_damaged(self, counts: Mapping[str, int]) -> Path | None:
        """The first class that has another number of images than it had."""
        folders = {self.final / wnid: num for wnid, num in counts.items()}
        return next((path for path, num in folders.items() if _count_files(path) != num), None)

    def begin(self, archive: Mapping[str, Any]) -> None:
        """Claims the folder for an archive, or continues it; refuses a folder with other files."""
        state = _read_json(self._state_path)
        if state:
            self._check_same(state.get("archive"), archive)
        else:
            # A state file that a power cut tore is ours too; every file is then checked by size.
            is_ours = self._state_path.exists() or self.marker.exists()
            others = self._published()
            if others and not is_ours:
                raise UserError(
                    f"{self.final} holds something else ({os.fsdecode(min(others))}); "
                    "remove it or choose another --output_dir"
                )
            _write_json(self._state_path, {"archive": dict(archive)})
        for leftover in self._staging.glob("run-*"):
            if self._has_lock:  # else it may be another process at work
                shutil.rmtree(leftover)
        self._whole.mkdir(exist_ok=True)
        self.run.mkdir()

    def _check_same(self, known: Any, archive: Mapping[str, Any]) -> None:
        if known != dict(archive):
            raise UserError(
                f"{self.final} is the extraction of another archive or of an older version of it "
                f"({known}, now {dict(archive)}); remove it or choose another --output_dir"
            )

    def finished(self, classes: Sequence[bytes], sizes_of: Callable[[bytes], Sizes]) -> set[bytes]:
        """The classes that are already complete: exactly their files, with the right sizes."""
        published = self._published()
        self._check_strangers(published, classes)
        staged = {os.fsencode(name) for name in os.listdir(self._whole)} & set(classes)
        return {
            wnid
            for wnid in published | staged
            if has_files(self._place(self.final, wnid), sizes_of(wnid))
            or has_files(self._place(self._whole, wnid), sizes_of(wnid))
        }

    def _published(self) -> set[bytes]:
        names = set(map(os.fsencode, os.listdir(self.final)))
        return names - {os.fsencode(self._staging.name)}

    def _check_strangers(self, published: set[bytes], classes: Iterable[bytes]) -> None:
        strangers = published - set(classes)
        if strangers:
            raise UserError(
                f"{self.final} holds {os.fsdecode(min(strangers))!r}, which is not a class of the "
                "archive; remove it or choose another --output_dir"
            )

    def class_is_staged(self, wnid: bytes) -> bool:
        """Whether an earlier run completed and staged the class."""
        return self._place(self._whole, wnid).is_dir()

    def size_of(self, wnid: bytes, name: bytes) -> int:
        """The size of an image of a staged or published class, or -1."""
        for folder in (self._whole, self.final):
            with suppress(OSError):
                return (self._place(folder, wnid) / os.fsdecode(name)).stat().st_size
        return -1

    def reopen(self, wnid: bytes) -> bool:
        """Makes the class's folder in this run; True if it existed, complete or not."""
        for folder in (self._whole, self.final):
            with suppress(FileNotFoundError):
                self._place(folder, wnid).rename(self._place(self.run, wnid))
                return True
        self._place(self.run, wnid).mkdir()
        return False

    def stage(self, wnid: bytes) -> None:
        """Marks a class of this run as complete; it gets its final name later."""
        self._move(self._place(self.run, wnid), self._place(self._whole, wnid))

    def publish(self, wnid: bytes) -> None:
        """Gives a class of this run its final name."""
        self._move(self._place(self.run, wnid), self._place(self.final, wnid))

    def publish_staged(self, classes: Iterable[bytes]) -> None:
        """Gives staged classes their final names."""
        for wnid in classes:
            if self.class_is_staged(wnid):
                self._move(self._place(self._whole, wnid), self._place(self.final, wnid))

    def _move(self, source: Path, target: Path) -> None:
        """Renames a folder; replaces an incomplete one of that name."""
        try:
            source.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            target.rename(self.run / f"{source.name}.{secrets.token_hex(4)}.old")
            source.rename(target)

    def discard(self) -> None:
        """Removes what was staged from an archive that turned out to be wrong."""
        shutil.rmtree(self._staging, ignore_errors=True)
        with suppress(OSError):  # fails when it holds classes that an earlier run has published
            self.final.rmdir()

    def finish(self, archive: Mapping[str, Any], counts: Mapping[bytes, int], facts: Any) -> None:
        """Counts what is there, writes the marker and removes the staging folder."""
        self._check_strangers(self._published(), counts)
        for wnid, num in counts.items():
            there = _count_files(self._place(self.final, wnid))
            if there != num:
                raise DataError(f"{self.final}/{os.fsdecode(wnid)} has {there} images, not {num}")
        classes = {os.fsdecode(wnid): num for wnid, num in counts.items()}
        _write_json(self.marker, {"archive": dict(archive), "result": facts, "classes": classes})
        shutil.rmtree(self._staging, ignore_errors=True)

    @staticmethod
    def _place(folder: Path, wnid: bytes) -> Path:
        return folder / os.fsdecode(wnid)


def find_unfinished(folder: Path) -> Path | None:
    """The staging folder of an unfinished extraction into a folder, if any."""
    for split in ("train", "val"):
        for parent in (folder, folder / split):  # inside when the half is a mount of its own
            staging = parent / _staging_name(split)
            if staging.exists():
                return staging
    return None


def _staging_name(split: str) -> str:
    return f".{split}.extracting"


def has_files(folder: Path, sizes: Sizes) -> bool:
    """Whether a folder holds exactly these files, with these sizes."""
    try:
        with os.scandir(os.fsencode(folder)) as entries:
            found = {entry.name: entry.stat(follow_symlinks=False).st_size for entry in entries}
    except (FileNotFoundError, NotADirectoryError):
        return False
    return found == sizes


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Not synced: after a power cut a torn file counts as missing, and all sizes are checked."""
    write_json(path, value, is_synced=False)


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file, empty when there is none or it is torn."""
    try:
        value = parse_json(path.read_bytes(), MAX_MARKER_BYTES)
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _count_files(folder: Path) -> int:
    try:
        return len(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _device(path: Path) -> int:
    return path.stat().st_dev
