"""Whether an index is true of its tar: the headers of an image must say what the index says.

An index decides what is read and which label it gets. Its sums tie bytes to the index, not to the
truth, so every image that is read is compared with its own header, the 512 bytes before it:
- the name and the size, always;
- the class, by the folder in the image's path, or by the class tar around it. A class tar is looked
  at once per process, with the first image of its class that is read: its header lies before the
  first image of the class, and all images of the class must lie within it.
In a tar that is still arriving, the header of a class tar may come later than images of its class.
Then the class is looked at later: with another of its images, or by prove_classes.
Labels of a flat tar come from a label file, and no header can confirm those.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from dataset.archive.index_file import TarIndex
from dataset.archive.listing import class_of_tar
from dataset.archive.member_names import show
from dataset.archive.tar_header import (
    BLOCK,
    Entry,
    Pread,
    iter_tar,
    parse_number,
    read_entry,
    stored_name,
)
from dataset.archive.units import MAX_HEADERS
from dataset.errors import DataError
from dataset.names import is_class_tar

_NAME_RECORDS = (b"L", b"K", b"x", b"g")
_NEXT = 4 * BLOCK  # a long name takes two or three blocks: what lies before may arrive much later
_NEAR = 16 * BLOCK  # name records, and what precedes the first image of a class tar, are short
MAX_PROOF = BLOCK + _NEAR  # bytes before the first image of a class that prove the class

CanRead = Callable[[int, int], bool]  # whether the bytes [begin, end) of the tar are here


class HeaderCheck:
    """Compares the images of one tar with its index, as they are read; threads may share it."""

    def __init__(self, index: TarIndex) -> None:
        self._index = index
        self._what = str(index.tar)
        self._classes = [os.fsencode(name) for name in index.classes]
        self._proven: set[int] = set()  # classes whose class tar was seen, or that need none
        self._class_tars: list[Entry] = []  # all of them, if they had to be walked

    def check(self, i: int, header: bytes, pread: Pread, can_read: CanRead | None = None) -> None:
        """Raises DataError unless the tar has image i where the index says it is.

        header: the block before the image. pread reads the tar, which a plain name does not need.
        can_read: of a tar that is still arriving.
        """
        parts = self._agree_on_image(i, header, pread)
        label = int(self._index.label[i])
        if self._index.labels_from or label in self._proven:
            return
        if len(parts) > 1 or self._is_in_class_tar(label, pread, can_read):
            self._proven.add(label)

    def prove_classes(self, pread: Pread, can_read: CanRead) -> list[str]:
        """Looks at all classes, as far as the tar is here; returns those that are still to come."""
        places = (self._first_images, *self.proofs)
        late = []
        for i, begin, end in zip(*(array.tolist() for array in places), strict=True):
            label = int(self._index.label[i])
            if label not in self._proven and can_read(begin, end):
                self.check(i, pread(BLOCK, end - BLOCK), pread, can_read)
            if label not in self._proven:
                late.append(self._index.classes[label])
        return late

    @property
    def proofs(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Where each class is proven: the bytes [begin, end) before its first image."""
        end = self._index.offset[self._first_images]
        return np.maximum(0, end - MAX_PROOF), end

    @functools.cached_property
    def _first_images(self) -> npt.NDArray[np.int64]:
        """The image of each class that lies first in the tar; none if no header has the class."""
        in_tar = np.lexsort((self._index.offset, self._index.label))
        is_first = np.diff(self._index.label[in_tar], prepend=-1) != 0
        first: npt.NDArray[np.int64] = in_tar[is_first]
        return first[:0] if self._index.labels_from else first

    def _agree_on_image(self, i: int, header: bytes, pread: Pread) -> list[bytes]:
        """The path of an image, in parts; raises unless its headers agree with the index."""
        found = "no header of a file"
        is_file = len(header) == BLOCK and header[156:157] in (b"0", b"\0", b"7")
        if is_file:
            with suppress(DataError):  # a size that is no number
                path, size = stored_name(header), parse_number(header[124:136], 0, self._what)
                if (parts := self._agrees(i, path, size)) is not None:
                    return parts
                found = f"{show(path)} of {size} bytes"
        # A long name is in a record of its own, and what the header says is a part of it.
        for entry in self._find_entries(int(self._index.offset[i]), pread) if is_file else ():
            if (parts := self._agrees(i, entry.name, entry.size)) is not None:
                return parts
            found = f"{show(entry.name)} of {entry.size} bytes"
        index = self._index
        where = f"{index.classes[index.label[i]]}/{index.name(i)} of {index.size[i]} bytes"
        raise self._refuse(f"{where} at byte {index.offset[i]}", found)

    def _agrees(self, i: int, path: bytes, size: int) -> list[bytes] | None:
        """The parts of a path, if it and the size can be those of image i."""
        index = self._index
        parts = [part for part in path.split(b"/") if part not in (b"", b".")]
        name = index.names[index.name_offset[i] : index.name_offset[i + 1]].tobytes()
        if size != index.size[i] or not parts or parts[-1] != name:
            return None
        has_class = len(parts) > 1 and not index.labels_from
        return parts if not has_class or parts[-2] == self._classes[index.label[i]] else None

    def _find_entries(self, offset: int, pread: Pread) -> Iterator[Entry]:
        """Files whose bytes begin at an offset and whose first header is a name record."""
        for position, block in _blocks_before(offset - BLOCK, (_NEXT, _NEAR, MAX_HEADERS), pread):
            if block[156:157] in _NAME_RECORDS:
                with suppress(DataError):  # bytes of an image may look like a header
                    entry = read_entry(pread, position, self._index.tar_size, self._what)
                    if entry is not None and entry.offset == offset:
                        yield entry

    def _is_in_class_tar(self, label: int, pread: Pread, can_read: CanRead | None) -> bool:
        """Whether all images of a class lie in the class tar of its name; raises if they do not.

        False: the header that says so is not here yet.
        """
        index = self._index
        first, last = np.searchsorted(index.label, [label, label + 1])
        offset = index.offset[first:last]
        begin, end = int(offset.min()), int((offset + index.size[first:last]).max())
        if can_read is not None and not can_read(max(0, begin - MAX_PROOF), begin):
            return False
        found = "no class tar"
        for entry in self._find_class_tars(begin, pread, can_read):
            if entry is None:
                return False
            last_byte = entry.offset + entry.size - 1
            if class_of_tar(entry.name) == self._classes[label] and end <= last_byte + 1:
                return True
            found = f"{show(entry.name)} in the bytes {entry.offset}-{last_byte}"
        what = f"all images of {index.classes[label]} in the bytes {begin}-{end - 1}"
        raise self._refuse(what, found)

    def _find_class_tars(
        self, begin: int, pread: Pread, can_read: CanRead | None
    ) -> Iterator[Entry | None]:
        """The class tar around a byte: by the header before it, else by all headers of the tar.

        None: those that decide are not all here.
        """
        adjoins = False
        for position, block in _blocks_before(begin - BLOCK, (_NEAR,), pread):
            if is_class_tar(stored_name(block)):
                with suppress(DataError):
                    entry = read_entry(pread, position, self._index.tar_size, self._what)
                    if entry is not None and begin < entry.offset + entry.size:
                        yield entry
                        adjoins |= entry.offset == begin - BLOCK
        if not self._class_tars:
            if can_read is not None and not can_read(0, self._index.tar_size):
                yield from () if adjoins else (None,)
                return
            entries = iter_tar(pread, 0, self._index.tar_size, self._what)
            self._class_tars = [entry for entry in entries if is_class_tar(entry.name)]
        yield from (e for e in self._class_tars if e.offset <= begin < e.offset + e.size)

    def _refuse(self, claim: str, found: str) -> DataError:
        tar = self._what
        return DataError(
            f"the index of {tar} is wrong: it has {claim}, the tar has {found}; delete the index "
            f"and write it again: python scripts/index_tar.py {tar}"
        )


def _blocks_before(end: int, reaches: tuple[int, ...], pread: Pread) -> Iterator[tuple[int, bytes]]:
    """The blocks before a byte and where each begins, the nearest first."""
    done = 0
    for reach in reaches:
        reach = min(reach, end // BLOCK * BLOCK)
        data = pread(reach - done, end - reach) if reach > done else b""
        for place in range(len(data) - BLOCK, -1, -BLOCK):
            yield end - reach + place, data[place : place + BLOCK]
        done = reach
