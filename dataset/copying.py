"""The hot loop of extraction: images from an archive's bytes into files, each written once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dataset.errors import DataError
from dataset.listing import Listing
from dataset.zip_directory import ZipDirectory, read_member

# One read serves about two images. The buffer must stay in the processor's own cache between the
# read and the writes: with 1 MiB the same work took 1.4 times as long. sendfile, mmap and processes
# instead of threads were measured within 10 % of it: the kernel's copying takes the time.
_READ = 256 << 10
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

CopyImages = Callable[[int, Sequence[bytes], npt.NDArray[np.int64]], None]


class Stopped(Exception):
    """Another worker has failed, or the user wants to stop."""


class TarCopier:
    """Copies images of a tar; shared by threads, each with a buffer of its own."""

    def __init__(self, fd: int, archive: Path, listing: Listing, stop: threading.Event) -> None:
        self._fd, self._archive, self._stop = fd, archive, stop
        self._offset, self._size = listing.offset, listing.size
        self._local = threading.local()

    def __call__(self, dir_fd: int, paths: Sequence[bytes], rows: npt.NDArray[np.int64]) -> None:
        """Writes the images `rows` (in the order of the tar) as paths below dir_fd."""
        view = self._buffer()
        offsets, sizes = self._offset[rows].tolist(), self._size[rows].tolist()
        end = offsets[-1] + sizes[-1]
        start = stop = 0  # what the buffer holds of the tar
        for path, offset, size in zip(paths, offsets, sizes, strict=True):
            if self._stop.is_set():
                raise Stopped
            if size > _READ:
                write_file(dir_fd, path, self._pieces(offset, size))
                start = stop = 0
                continue
            if offset < start or offset + size > stop:
                start, stop = offset, offset + self._fill(view, offset, min(_READ, end - offset))
            write_file(dir_fd, path, [view[offset - start : offset - start + size]])

    def _pieces(self, offset: int, size: int) -> Iterator[memoryview]:
        view = self._buffer()
        for done in range(0, size, _READ):
            yield view[: self._fill(view, offset + done, min(_READ, size - done))]

    def _fill(self, view: memoryview, offset: int, length: int) -> int:
        """Reads exactly `length` bytes into the buffer; a shorter file is not the one listed."""
        num = 0
        while num < length:
            try:
                more = os.preadv(self._fd, [view[num:length]], offset + num)
            except OSError as error:
                raise DataError(
                    f"{self._archive} cannot be read at byte {offset + num}: {error.strerror}"
                ) from error
            if not more:
                raise DataError(f"{self._archive} ends at byte {offset + num}; was it changed?")
            num += more
        return num

    def _buffer(self) -> memoryview:
        if not hasattr(self._local, "view"):
            self._local.view = memoryview(bytearray(_READ))
        view: memoryview = self._local.view
        return view


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
            write_file(dir_fd, path, [memoryview(data)])


def write_file(dir_fd: int | None, path: bytes, pieces: Iterable[memoryview]) -> None:
    """Creates a file below dir_fd; one that exists is an error, never overwritten."""
    fd = os.open(path, _CREATE, 0o666, dir_fd=dir_fd)
    try:
        for piece in pieces:
            num = os.write(fd, piece)
            while num < len(piece):
                num += os.write(fd, piece[num:])
    finally:
        os.close(fd)  # network filesystems tell of a full disk only here
