"""Files of torch.save: written with a checksum over all bytes, which is checked before use.

torch.load checks nothing. A file of ours ends in a checksum, which is the comment of its zip, so
that every reader of torch's files takes it. Files of others have the zip's own: one of each record.
"""

from __future__ import annotations

import errno
import logging
import os
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from dataset.errors import DataError, UserError

log = logging.getLogger("trainyard")

ZIP_START = b"PK\x03\x04"
MARK = b"trainyard crc32 "  # then 8 hexadecimal digits: the sum of all bytes before them
NUM_DIGITS = 8
NUM_LENGTH = 2  # bytes at the end of a zip that say how long its comment is
DOS_FOLDER = 0x10
READ_SIZE = 1 << 23


def write_torch_file(path: Path, value: Any) -> None:
    """Writes the value and its checksum and syncs them; a disk problem is an OSError."""
    try:
        with open(path, "wb") as file:
            _save_summed(value, file)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # a write and an fsync do not name the file
        raise OSError(error.errno, error.strerror, str(path)) from None


def _save_summed(value: Any, file: BinaryIO) -> None:
    summed = _SummedFile(file)
    try:
        torch.save(value, summed)  # type: ignore[arg-type]
    except RuntimeError:
        if summed.error is None:
            raise
        # torch replaces the disk's error by "inline_container.cc … unexpected pos".
        raise summed.error from None
    summed.add_comment()


def read_torch_file(path: Path, *, must_be_zip: bool) -> Any:
    """The value of a whole file, on the CPU; a damaged one is a DataError.

    The format of torch before 1.6 has no checksums: it is read with a warning, or refused if
    must_be_zip.
    """
    if must_be_zip or _is_zip(path):
        check_torch_file(path)
    else:
        log.warning("%s is in torch's format before 1.6, without checksums: not verified", path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling foreign bytes can raise anything
        reason = (str(error) or type(error).__name__).splitlines()[0][:150]
        raise UserError(
            f"{path} cannot be loaded safely: {reason}; give a checkpoint, or a file of torch.save "
            "with a state_dict"
        ) from None


def check_torch_file(path: Path) -> None:
    """Raises if a byte of a file of torch.save was changed."""
    try:
        damage = find_damage(path)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        damage = str(error.strerror)  # a bad sector: another file may be whole
    if damage:
        raise DataError(f"{path} is damaged ({damage}); use another copy of it")


def find_damage(path: Path) -> str:
    """What is wrong with the bytes of a file of torch.save, or an empty string."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        file.seek(max(0, size - len(MARK) - NUM_DIGITS))
        comment = file.read()
        if comment[: len(MARK)] == MARK:
            file.seek(0)
            wanted, found = comment[len(MARK) :], _sum_file(file, size - NUM_DIGITS)
            return "" if found == wanted else "its checksum differs"
    return _find_damage_in_zip(path)


def _find_damage_in_zip(path: Path) -> str:
    """The same, by the checksums that a zip keeps for each of its records."""
    if path.stat().st_size == 0:
        return "it is empty"
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
            return f"the checksum of {bad} differs" if bad else _find_odd_ends(path, archive)
    except Exception as error:  # zipfile raises what it likes for damaged headers
        return f"it is not a complete zip: {error or type(error).__name__}"


def _find_odd_ends(path: Path, archive: zipfile.ZipFile) -> str:
    """What torch never writes: bytes before the first record, a comment but ours, a folder.

    If a flipped bit turns a record into a folder, torch.load silently leaves it out.
    """
    with open(path, "rb") as file:
        starts_well = file.read(len(ZIP_START)) == ZIP_START
    has_folder = any(record.external_attr & DOS_FOLDER for record in archive.infolist())
    is_odd = not starts_well or archive.comment or has_folder
    return "its zip has another layout than torch's" if is_odd else ""


def _is_zip(path: Path) -> bool:
    """Whether it is, or was, a zip: its start or its end may be damaged."""
    with open(path, "rb") as file:
        start = file.read(len(ZIP_START))
    return start in (ZIP_START, b"") or zipfile.is_zipfile(path)


def _sum_file(file: BinaryIO, size: int) -> bytes:
    checksum = 0
    while size > 0 and (data := file.read(min(READ_SIZE, size))):
        checksum = zlib.crc32(data, checksum)
        size -= len(data)
    return _digits(checksum)


def _digits(checksum: int) -> bytes:
    return b"%08x" % checksum


class _SummedFile:
    """Passes the bytes of torch.save to a file, sums them, and remembers what the disk said."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._sum = 0
        self._held = b""  # the last bytes, which the comment's length replaces
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        view = memoryview(data).cast("B")
        size = len(view)
        if size < NUM_LENGTH:
            view = memoryview(self._held + bytes(view))
        else:
            self._put(self._held)
        self._put(view[:-NUM_LENGTH])
        self._held = bytes(view[-NUM_LENGTH:])
        return size

    def flush(self) -> None:
        self._guard(self._file.flush)

    def add_comment(self) -> None:
        """Ends the zip with a comment that sums up all before it."""
        assert self._held == bytes(NUM_LENGTH), "torch.save ended the file in a way of its own"
        self._put((len(MARK) + NUM_DIGITS).to_bytes(NUM_LENGTH, "little") + MARK)
        self._put(_digits(self._sum))

    def _put(self, data: bytes | memoryview) -> None:
        self._sum = zlib.crc32(data, self._sum)
        self._guard(lambda: self._file.write(data))

    def _guard(self, call: Callable[[], object]) -> None:
        try:
            call()
        except OSError as error:
            self.error = error
            raise
