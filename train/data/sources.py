"""Where images come from: a folder of class folders, or an indexed tar read in place (no torch)."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import stat
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dataset.archive.class_folders import list_classes, list_images, refuse_empty
from dataset.archive.header_check import HeaderCheck
from dataset.archive.index_file import TarIndex
from dataset.archive.tar_header import BLOCK
from dataset.errors import CommandError, DataError, PassingError, UserError, describe_os_error

log = logging.getLogger("trainyard")

DISK = "Does its disk answer?"


class Source(Protocol):
    """Labelled images as bytes, numbered in the bytewise order of (class, file name)."""

    classes: list[str]
    labels: npt.NDArray[np.int64]

    def __len__(self) -> int: ...
    def name(self, index: int) -> str: ...
    def where(self, index: int) -> str: ...
    def raw_names(self, start: int, end: int) -> list[bytes]: ...
    def read(self, index: int) -> bytes: ...
    def explain_wait(self, index: int) -> str: ...
    def check_unchanged(self) -> None: ...


class FolderSource:
    """The images of root/CLASS/FILE. Names are one blob, so that forked workers share the pages."""

    def __init__(self, root: Path, *, allow_empty: bool = False) -> None:
        self.root = root
        self.classes = list_classes(root)
        if not self.classes:
            raise UserError(f"no class folders in {root}; run scripts/extract_ILSVRC_mp.py")
        blob, ends, labels, empty = bytearray(), [0], [], []
        for label, wnid in enumerate(self.classes):
            files = list_images(root / wnid)
            if not files:
                empty.append(wnid)
            for file in files:
                blob += os.fsencode(wnid) + b"/" + file
                ends.append(len(blob))
                labels.append(label)
        if not labels:
            raise UserError(f"no images in the class folders of {root}; is it the right folder?")
        if not allow_empty:
            refuse_empty(root, empty)
        self._names = np.frombuffer(bytes(blob), dtype=np.uint8)
        self._ends = np.array(ends, dtype=np.int64)
        self.labels = np.array(labels, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        return os.fsdecode(self._names[self._ends[index] : self._ends[index + 1]].tobytes())

    def where(self, index: int) -> str:
        """The path of an image."""
        return f"{self.root}/{self.name(index)}"

    def raw_names(self, start: int, end: int) -> list[bytes]:
        return _cut(self._names, self._ends[start : end + 1])

    def read(self, index: int) -> bytes:
        file = self.where(index)
        try:
            # Non-blocking: a FIFO in place of an image would block the reader for ever.
            fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
            try:
                found = os.fstat(fd)
                if not stat.S_ISREG(found.st_mode):
                    raise DataError(f"{file} is not a regular file; put the image in its place")
                return _read_whole(fd, found.st_size, 0, file)
            finally:
                os.close(fd)
        except OSError as error:
            raise explain_failed_read(error, file) from None

    def explain_wait(self, index: int) -> str:
        """What to say of a read that takes very long."""
        return DISK

    def check_unchanged(self) -> None:
        """Does nothing: a folder's files are opened for each read, so none can be stale."""


class TarSource:
    """The images of an indexed tar, read in place: positioned reads, safe over fork and spawn.

    Each image is read together with its header, which must say what the index says.
    """

    def __init__(self, index: TarIndex) -> None:
        self.index = index
        self._headers = HeaderCheck(index)
        self._fd: int | None = None
        self._first_seen = self._identify()
        self.classes = index.classes
        self.labels = index.label.astype(np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_fd": None}

    def name(self, index: int) -> str:
        """CLASS/FILE, as in the folder that would be extracted from this tar."""
        return f"{self.index.classes[self.index.label[index]]}/{self.index.name(index)}"

    def where(self, index: int) -> str:
        """The image and its tar."""
        return f"{self.name(index)} in {self.index.tar}"

    def raw_names(self, start: int, end: int) -> list[bytes]:
        return list_names(self.index, start, end)

    def read(self, index: int) -> bytes:
        offset, size = int(self.index.offset[index]), int(self.index.size[index])
        where, ahead = self.where(index), min(BLOCK, offset)
        try:
            data = self._read_bytes(size, offset, where, ahead)
            self._check_header(index, data[:ahead])
            return data[ahead:]
        except OSError as error:
            raise explain_failed_read(error, where) from None

    def explain_wait(self, index: int) -> str:
        """What to say of a read that takes very long."""
        return DISK

    def _read_bytes(self, size: int, offset: int, where: str, ahead: int) -> bytes:
        """The bytes of an image, with so many ahead of it."""
        return _read_whole(self._open(), size, offset, where, ahead)

    def _open(self) -> int:
        """The descriptor of the tar; a forked worker may share it, as pread has no cursor."""
        if self._fd is None:
            self._fd = os.open(self.index.tar, os.O_RDONLY | os.O_NONBLOCK)
        return self._fd

    def _check_header(self, index: int, header: bytes) -> None:
        try:
            self._compare(index, header)
        except DataError:
            self.check_unchanged()  # if it was overwritten, that is the better message
            raise

    def _compare(self, index: int, header: bytes) -> None:
        self._headers.check(index, header, self._pread)

    def _pread(self, size: int, offset: int) -> bytes:
        return os.pread(self._open(), size, offset)

    def check_unchanged(self) -> None:
        """Raises if the tar was overwritten or replaced since this process opened it.

        The index is that of the old tar: wrong bytes would be read without notice.
        """
        try:
            now = self._identify()
        except OSError as error:
            raise explain_failed_read(error, str(self.index.tar)) from None
        if now != self._first_seen:
            changes = zip(now._fields, self._first_seen, now, strict=True)
            told = ", ".join(f"{name} {old} -> {new}" for name, old, new in changes if old != new)
            raise DataError(
                f"{self.index.tar} was changed during the training ({told}); put the old one "
                f"back, or index it again: python scripts/index_tar.py {self.index.tar}"
            )

    def _identify(self) -> FileIdentity:
        found = self.index.tar.stat()
        return FileIdentity(found.st_ino, found.st_size, found.st_mtime_ns)


class AbsentTar(TarSource):
    """The classes and names of a tar by its index alone; its images cannot be read."""

    def _identify(self) -> FileIdentity:
        return FileIdentity(0, self.index.tar_size, 0)


class FileIdentity(NamedTuple):
    inode: int
    size: int
    mtime_ns: int


def _read_whole(fd: int, size: int, offset: int, name: str, ahead: int = 0) -> bytes:
    """The bytes of an image, with so many ahead of it."""
    total, begin = ahead + size, offset - ahead
    data = os.pread(fd, total, begin)
    while len(data) < total:  # a network filesystem may return less than was asked for
        more = os.pread(fd, total - len(data), begin + len(data))
        if not more:
            num_read = max(0, len(data) - ahead)
            raise DataError(f"{name}: the file ends after {num_read} of {size} bytes")
        data += more
    return data


def explain_failed_read(error: OSError, where: str) -> CommandError:
    """The error for a failed read: one that the user can fix, or a disk that may recover."""
    lasting = describe_os_error(OSError(error.errno, error.strerror, where))
    if lasting and error.errno != errno.EIO:  # of a network disk it says no more than a time-out
        return UserError(lasting)
    return PassingError(f"cannot read {where}: {error.strerror}; run the same command again")


def list_names(index: TarIndex, start: int, end: int) -> list[bytes]:
    """CLASS/FILE of some images of a tar, as in the folder that would be extracted from it."""
    labels = index.label[start:end].tolist()
    folders = {label: os.fsencode(index.classes[label]) + b"/" for label in set(labels)}
    files = _cut(index.names, index.name_offset[start : end + 1])
    return [folders[label] + file for label, file in zip(labels, files, strict=True)]


def _cut(blob: npt.NDArray[np.uint8], bounds: npt.NDArray[np.int64]) -> list[bytes]:
    """The names that lie one after the other in a blob, between the bounds."""
    data = blob[bounds[0] : bounds[-1]].tobytes()
    ends = (bounds - bounds[0]).tolist()
    return [data[start:end] for start, end in itertools.pairwise(ends)]
