"""The hot loop of extraction: images from an archive's bytes into files, each written once."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dataset.archive.listing import Listing
from dataset.archive.zip_directory import ZipDirectory, read_member
from dataset.durable import write_all
from dataset.errors import DataError

_PIECE = 256 << 10  # where sendfile cannot be had; stays in the processor's own cache
_NO_SENDFILE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

CopyImages = Callable[[int, Sequence[bytes], npt.NDArray[np.int64]], None]


class Stopped(Exception):
    """Another worker has failed, or the user asked to stop."""


class TarCopier:
    """Copies images of a tar inside the kernel, which takes 0.9 of the time of reads and writes."""

    def __init__(self, fd: int, archive: Path, listing: Listing, stop: threading.Event) -> None:
        self._fd, self._archive, self._stop = fd, archive, stop
        self._offset, self._size = listing.offset, listing.size
        self._send: Callable[[int, int, int, int], int] = os.sendfile

    def __call__(self, dir_fd: int, paths: Sequence[bytes], rows: npt.NDArray[np.int64]) -> None:
        """Writes the images `rows` (in the order of the tar) as paths below dir_fd."""
        offsets, sizes = self._offset[rows].tolist(), self._size[rows].tolist()
        is_stopped, copy_some = self._stop.is_set, self._copy_some
        for path, offset, size in zip(paths, offsets, sizes, strict=True):
            if is_stopped():
                raise Stopped
            fd = os.open(path, _CREATE, 0o666, dir_fd=dir_fd)
            try:
                done = copy_some(fd, offset, size)
                while done < size:
                    done += copy_some(fd, offset + done, size - done)
            finally:
                os.close(fd)  # network filesystems tell of a full disk only here

    def _copy_some(self, fd: int, offset: int, size: int) -> int:
        """Appends up to `size` bytes of the tar to a file; returns how many it were."""
        send = self._send  # another thread may find out meanwhile that there is no sendfile
        try:
            num = send(fd, self._fd, offset, size)
        except OSError as error:
            if send is not _read_and_write and error.errno in _NO_SENDFILE:
                self._send = _read_and_write
                return self._copy_some(fd, offset, size)
            self._check_readable(offset, size)
            raise
        if not num:
            raise DataError(f"{self._archive} ends at byte {offset}; was it changed?")
        return num

    def _check_readable(self, offset: int, size: int) -> None:
        """Distinguishes a tar that cannot be read from a file that cannot be written."""
        try:
            os.pread(self._fd, size, offset)
        except OSError as error:
            raise DataError(
                f"{self._archive} cannot be read at byte {offset}: {error.strerror}"
            ) from error


def _read_and_write(fd: int, tar_fd: int, offset: int, size: int) -> int:
    """What sendfile does, for filesystems that do not have it."""
    return os.write(fd, os.pread(tar_fd, min(size, _PIECE), offset))


class ZipCopier:
    """Copies images of a zip, unpacked and checked one by one."""

    def __init__(
        self,
        fd: int,
        archive: Path,
        listing: Listing,
        stop: threading.Event,
        directory: ZipDirectory,
    ) -> None:
        self._fd, self._archive, self._stop = fd, archive, stop
        self._directory, self._row = directory, listing.row

    def __call__(self, dir_fd: int, paths: Sequence[bytes], rows: npt.NDArray[np.int64]) -> None:
        """Writes the images `rows` as paths below dir_fd."""
        for path, row in zip(paths, self._row[rows].tolist(), strict=True):
            if self._stop.is_set():
                raise Stopped
            data = read_member(self._fd, self._directory, row, self._archive)
            write_file(dir_fd, path, [data])


def write_file(dir_fd: int | None, path: bytes, pieces: Iterable[bytes | memoryview]) -> None:
    """Creates a file below dir_fd; one that exists is an error, never overwritten."""
    fd = os.open(path, _CREATE, 0o666, dir_fd=dir_fd)
    try:
        for piece in pieces:
            write_all(fd, piece)
    finally:
        os.close(fd)
