"""The images of a tar that is read once, from front to back; such a walk can be saved."""

from __future__ import annotations

import io
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dataset.archive.listing import (
    LabelNames,
    Listing,
    Split,
    check_outer_names,
    class_of_tar,
    find_in_class,
    find_in_tree,
    order_images,
)
from dataset.archive.member_names import check_names, show
from dataset.archive.tar_header import BLOCK, Entry, Pread, read_entry, round_up
from dataset.archive.tar_images import check_sizes, join_classes
from dataset.archive.tar_walk import Entries
from dataset.errors import DataError
from dataset.names import is_class_tar, is_hidden

_UNKNOWN, _TREE, _CLASS_TARS = range(3)


class Files:
    """The plain files of a tar, in its order, as many as were found so far."""

    def __init__(self) -> None:
        self.names: list[bytes] = []
        self.offset, self.size = array("q"), array("q")

    def __len__(self) -> int:
        return len(self.names)

    def add(self, entry: Entry) -> None:
        self.names.append(entry.name)
        self.offset.append(entry.offset)
        self.size.append(entry.size)

    def part(self, first: int, end: int) -> Entries:
        """The files [first, end) as a walk over a local tar gives them."""
        offset, size = np.array(self.offset[first:end]), np.array(self.size[first:end])
        return Entries(self.names[first:end], offset.astype(np.int64), size.astype(np.int64))

    def pack(self) -> dict[str, npt.NDArray[Any]]:
        """Everything as arrays."""
        lengths = np.fromiter(map(len, self.names), np.int64, len(self.names))
        names = np.frombuffer(b"".join(self.names), np.uint8)
        return {
            "names": names,
            "lengths": lengths,
            "offset": np.array(self.offset, np.int64),
            "size": np.array(self.size, np.int64),
        }

    @classmethod
    def unpack(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Files:
        """What `pack` gave."""
        files, blob = cls(), io.BytesIO(arrays["names"].tobytes())
        files.names += map(blob.read, arrays["lengths"].tolist())
        files.offset.frombytes(arrays["offset"].astype(np.int64).tobytes())
        files.size.frombytes(arrays["size"].astype(np.int64).tobytes())
        return files


class StreamWalk:
    """A walk over class tars in a tar, a tree or a flat tar; its reads are at growing positions.

    Between two entries it can be saved, and a later process goes on from there.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.position = 0  # of the header that is read next
        self.first_header = self.last_header = b""
        self._path, self._size = path, size
        self._shape = _UNKNOWN
        self._is_done = False
        self._tar_end = 0  # of the class tar that the position is in; 0 outside of one
        self._outer, self._inner = Files(), Files()
        self._first_rows: list[int] = []  # of each class tar among the inner files
        self._classes: set[bytes] = set()  # those that have a class tar
        self._header = b""  # read last

    def run(self, pread: Pread, on_entry: Callable[[], None]) -> None:
        """Walks to the end of the tar; `on_entry` is called between two entries."""

        def read(length: int, offset: int) -> bytes:
            data = pread(length, offset)
            self._header = data if length == BLOCK else self._header
            return data

        while not self._is_done:
            if self._tar_end:
                self._walk_class_tar(read, on_entry)
            entry = read_entry(read, self.position, self._size, str(self._path))
            if entry is None:
                self.position, self._is_done = self._size, True
            else:
                self._take(entry)
            on_entry()

    def _take(self, entry: Entry) -> None:
        """Notes a file of the outer tar, and enters it if it is a class tar."""
        self.position = entry.end
        if not entry.name:
            return
        check_names([entry.name], str(self._path))
        self._outer.add(entry)
        self.last_header = self._header
        is_tar = is_class_tar(entry.name)
        if self._shape == _UNKNOWN and (is_tar or not is_hidden(entry.name)):
            self._shape = _CLASS_TARS if is_tar else _TREE
        if self._shape == _CLASS_TARS:
            is_twice = is_tar and class_of_tar(entry.name) in self._classes
            check_outer_names(self._outer.names if is_twice else [entry.name], self._path)
            if is_tar:
                self._classes.add(class_of_tar(entry.name))
                self._first_rows.append(len(self._inner))
                self.position, self._tar_end = entry.offset, entry.offset + entry.size

    def _walk_class_tar(self, pread: Pread, on_entry: Callable[[], None]) -> None:
        name, start = self._outer.names[-1], self._outer.offset[-1]
        what = f"{self._path}: {show(name)}"
        while (entry := read_entry(pread, self.position, self._tar_end, what)) is not None:
            if entry.name:
                self._inner.add(entry)
            self.position = entry.end
            on_entry()
        entries = self._inner.part(self._first_rows[-1], len(self._inner))
        check_sizes(find_in_class(class_of_tar(name), entries.names, what), entries, what)
        self.position, self._tar_end = start + round_up(self._outer.size[-1]), 0

    def list_images(self, split: Split, label_names: LabelNames) -> Listing:
        """The images in sample order, as list_tar gives them for a local tar."""
        if not self._outer or self._shape == _UNKNOWN:
            raise DataError(f"{self._path} holds no files; fetch it again")
        last_header = self._outer.offset[-1] - BLOCK
        if self._shape == _TREE:
            entries = self._outer.part(0, len(self._outer))
            found = find_in_tree(entries.names, split, self._path)
        else:
            check_outer_names(self._outer.names, self._path)
            names = [name for name in self._outer.names if is_class_tar(name)]
            bounds = [*self._first_rows, len(self._inner)]
            parts = []
            for name, first, end in zip(names, bounds, bounds[1:], strict=False):
                entries = self._inner.part(first, end)
                what = f"{self._path}: {show(name)}"
                parts.append((entries, find_in_class(class_of_tar(name), entries.names, what)))
            entries, found = join_classes(parts, len(self._outer) - len(names))
        return order_images(
            found, entries.offset, entries.size, label_names, self._path, last_header
        )

    def pack(self) -> dict[str, npt.NDArray[Any]]:
        """The whole state as arrays, between two entries."""
        numbers = [self.position, self._shape, self._is_done, self._tar_end]
        arrays: dict[str, npt.NDArray[Any]] = {
            "walk": np.array(numbers, np.int64),
            "first_rows": np.array(self._first_rows, np.int64),
            "first_header": np.frombuffer(self.first_header, np.uint8),
            "last_header": np.frombuffer(self.last_header, np.uint8),
        }
        for name, files in (("outer", self._outer), ("inner", self._inner)):
            arrays |= {f"{name}_{field}": values for field, values in files.pack().items()}
        return arrays

    def unpack(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Goes on from what `pack` gave."""
        self.position, self._shape, self._is_done, self._tar_end = arrays["walk"].tolist()
        self._first_rows = arrays["first_rows"].tolist()
        self.first_header = arrays["first_header"].tobytes()
        self.last_header = arrays["last_header"].tobytes()
        fields = Files().pack()
        self._outer = Files.unpack({field: arrays[f"outer_{field}"] for field in fields})
        self._inner = Files.unpack({field: arrays[f"inner_{field}"] for field in fields})
        self._classes = {class_of_tar(name) for name in self._outer.names if is_class_tar(name)}
