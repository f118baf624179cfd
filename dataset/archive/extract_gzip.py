"""Extraction of a .tar.gz, which can only be read from front to back."""

from __future__ import annotations

import gzip
import os
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from dataset.archive.copy_images import write_file
from dataset.archive.labels import (
    BUILTIN,
    builtin_labels,
    is_real_val,
    label_table,
    match_labels,
    unknown_labels,
)
from dataset.archive.listing import (
    Split,
    check_depths,
    check_outer_names,
    class_of_tar,
    folders_below,
    name_in_class,
)
from dataset.archive.member_names import check_names, show
from dataset.archive.output_folder import OutputFolder
from dataset.archive.tar_header import ENDLESS, Entry, Pread, iter_tar
from dataset.archive.write_classes import CountImages, Written
from dataset.errors import DataError
from dataset.names import is_class_tar, is_image, is_wnid

_PIECE = 1 << 20


class ForwardReader:
    """Reads of a compressed file at positions that only grow."""

    def __init__(self, archive: Path) -> None:
        self._file = gzip.GzipFile(archive, "rb")
        self._archive, self._position = archive, 0

    def __enter__(self) -> ForwardReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._file.close()

    def pread(self, length: int, offset: int) -> bytes:
        """Bytes at an offset that is not before the last one; fewer at the end."""
        assert offset >= self._position, "a stream cannot be read backwards"
        while self._position < offset:
            if not self._read(min(_PIECE, offset - self._position)):
                return b""
        return self._read(length)

    def _read(self, length: int) -> bytes:
        try:
            data = self._file.read(length)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(
                f"{self._archive} is damaged or truncated after {self._position} unpacked bytes "
                f"({error}); fetch it again"
            ) from None
        self._position += len(data)
        return data


class StreamWriter:
    """Writes the images of a stream; classes stay staged until the stream ends without error."""

    def __init__(self, folder: OutputFolder, archive: Path, progress: CountImages) -> None:
        self._folder, self._archive, self._progress = folder, archive, progress
        self._open: set[bytes] = set()  # classes with a folder in this run
        self._new: set[bytes] = set()  # classes whose files are all of this run
        self._repaired: dict[bytes, set[bytes]] = {}  # class that was not whole -> names seen
        self.counts: Counter[bytes] = Counter()
        self.num_bytes = self.num_written = self.num_skipped = 0

    def write_all(self, pread: Pread, split: Split, labels: Path | None) -> None:
        """Writes all images of a split, from class tars, a tree or a flat tar."""
        labeller = FlatLabels(self._archive, labels)
        tars: list[bytes] = []
        depths: set[int] = set()
        current = b""
        for entry in iter_tar(pread, 0, ENDLESS, str(self._archive)):
            check_names([entry.name], str(self._archive))
            if is_class_tar(entry.name):
                tars.append(entry.name)
                check_outer_names(tars, self._archive)
                self._write_class_tar(entry, pread)
                continue
            folder, _, name = entry.name.rpartition(b"/")
            below = folders_below(folder, split)
            if not is_image(entry.name) or below is None:
                self.num_skipped += not is_image(entry.name)
                continue
            depths.add(len(below))
            check_depths(depths, self._archive)
            wnid = below[-1] if below else b""
            if split == "val" and not is_wnid(wnid) and labeller.knows(name):
                wnid = b""  # a folder around a flat archive
            if current and wnid != current:
                self._close(current)
            current = wnid
            self._put(wnid or labeller.label(name), name, entry, pread)
        labeller.finish()
        if split == "val" and len(self.counts) == 1 and not is_wnid(next(iter(self.counts))):
            raise unknown_labels(self._archive, [name])
        for wnid in list(self._open):
            self._close(wnid)

    def _write_class_tar(self, tar: Entry, pread: Pread) -> None:
        wnid, what = class_of_tar(tar.name), f"{self._archive}: {show(tar.name)}"
        before = self.counts[wnid]
        for entry in iter_tar(pread, tar.offset, tar.offset + tar.size, what):
            check_names([entry.name], what)
            if is_image(entry.name):
                self._put(wnid, name_in_class(wnid, entry.name, what), entry, pread)
            else:
                self.num_skipped += 1
        if self.counts[wnid] == before:
            raise DataError(f"{what} holds no image; fetch it again")
        self._close(wnid)

    def _put(self, wnid: bytes, name: bytes, entry: Entry, pread: Pread) -> None:
        """Writes one image, unless an earlier run left it in a complete class."""
        if entry.size == 0:
            raise DataError(f"{self._archive}: {show(name)} is empty (0 bytes); fetch it again")
        self.counts[wnid] += 1
        self.num_bytes += entry.size
        if wnid not in self._open:
            if wnid not in self._new and self._folder.size_of(wnid, name) == entry.size:
                return
            self._reopen(wnid)
        path = os.fsencode(self._folder.run) + b"/" + wnid + b"/" + name
        if wnid in self._repaired and name not in self._repaired[wnid]:
            self._repaired[wnid].add(name)
            if _size_of(path) == entry.size:
                return
            Path(os.fsdecode(path)).unlink(missing_ok=True)
        try:
            write_file(None, path, self._pieces(entry, pread))
        except FileExistsError:
            twice = show(wnid + b"/" + name)
            raise DataError(f"{self._archive}: two members are {twice}; repack it") from None
        self.num_written += entry.size
        self._progress(entry.size, 1)

    def _reopen(self, wnid: bytes) -> None:
        """Makes the folder of a class, or reopens the existing one."""
        self._open.add(wnid)
        if self._folder.reopen(wnid):
            if wnid not in self._new:
                self._repaired.setdefault(wnid, set())
        else:
            self._new.add(wnid)

    def _close(self, wnid: bytes) -> None:
        """Stages a class that seems complete; a later image of it reopens it."""
        if wnid in self._open:
            self._folder.stage(wnid)
            self._open.remove(wnid)

    def _pieces(self, entry: Entry, pread: Pread) -> Iterator[memoryview]:
        position, end = entry.offset, entry.offset + entry.size
        while position < end:
            piece = pread(min(_PIECE, end - position), position)
            if not piece:
                raise DataError(f"{self._archive} is truncated inside {show(entry.name)}")
            yield memoryview(piece)
            position += len(piece)


def _size_of(path: bytes) -> int:
    """The size of a file, or -1 without one."""
    try:
        return Path(os.fsdecode(path)).stat().st_size
    except FileNotFoundError:
        return -1


class FlatLabels:
    """The classes of a flat stream's images, looked up one by one and checked at the end."""

    def __init__(self, archive: Path, labels: Path | None) -> None:
        self._archive, self._labels = archive, labels
        self._names: list[bytes] = []
        self._known: dict[bytes, bytes] = {}
        self._known_from = self._source = ""  # _source: set when the first label is used

    def knows(self, name: bytes) -> bool:
        """Whether there is a label for an image of this name."""
        if not self._known:
            found = label_table(self._archive, self._labels)
            self._known, self._known_from = found or (builtin_labels(), BUILTIN)
        return name in self._known

    def label(self, name: bytes) -> bytes:
        """The class of an image."""
        is_known = self.knows(name)
        self._source = self._known_from
        self._names.append(name)
        if not is_known:
            if self._source == BUILTIN:
                raise unknown_labels(self._archive, self._names)
            match_labels([name], {}, self._source)
        return self._known[name]

    def finish(self) -> None:
        """Raises for labels without an image, or if the built-in table was used for another set."""
        if self._source == BUILTIN and not is_real_val(self._names):
            raise unknown_labels(self._archive, self._names)
        if self._source:
            match_labels(self._names, self._known, self._source)


def extract_stream(
    archive: Path, split: Split, labels: Path | None, folder: OutputFolder, progress: CountImages
) -> Written:
    """Stages the classes of a .tar.gz; the caller publishes them."""
    writer = StreamWriter(folder, archive, progress)
    try:
        with ForwardReader(archive) as reader:
            writer.write_all(reader.pread, split, labels)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder.final)) from error
    if not writer.counts:
        raise DataError(f"{archive} holds no images of the split {split!r}; fetch it again")
    return Written(dict(writer.counts), writer.num_bytes, writer.num_written, writer.num_skipped)
