"""TAR.index, the file: one .npz that says where each image of a tar is."""

from __future__ import annotations

import itertools
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dataset.archive.block_sums import BLOCK_SIZES, BlockSums
from dataset.archive.listing import Listing
from dataset.archive.tar_header import BLOCK
from dataset.archive.unit_sums import UnitSums
from dataset.archive.units import Units, cut_units
from dataset.durable import writing_whole
from dataset.errors import DataError, UserError

FORMATS = (1, 2)  # the second has a sum for each unit; without those the first is written
_NUMBER, _LIST = 0, 1  # dimensions
_FIELDS: dict[str, tuple[type[np.generic], int]] = {
    "format": (np.int64, _NUMBER),
    "tar_size": (np.int64, _NUMBER),
    "offset": (np.int64, _LIST),
    "size": (np.int64, _LIST),
    "label": (np.int32, _LIST),
    "names": (np.uint8, _LIST),
    "name_offset": (np.int64, _LIST),
    "classes": (np.uint8, _LIST),
    "class_offset": (np.int64, _LIST),
    "labels_from": (np.uint8, _LIST),
    "first_header": (np.uint8, _LIST),
    "last_header": (np.uint8, _LIST),
    "last_header_offset": (np.int64, _NUMBER),
    "block_size": (np.int64, _NUMBER),
    "block_crc32": (np.uint32, _LIST),
    "block_crc32c": (np.uint32, _LIST),  # in indexes of earlier versions
    "unit_version": (np.int64, _NUMBER),
    "unit_size": (np.int64, _NUMBER),
    "unit_crc32": (np.uint32, _LIST),
}
_OF_UNITS = {"unit_version", "unit_size", "unit_crc32"}
_OPTIONAL = {"block_size", "block_crc32", "block_crc32c", *_OF_UNITS}
_AGAIN = "write it again: python scripts/index_tar.py {}"


@dataclass(frozen=True)
class TarIndex:
    """The images of a tar in sample order: bytes [offset[i], offset[i] + size[i]) of the tar."""

    tar: Path
    offset: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]
    label: npt.NDArray[np.int32]
    classes: list[str]
    names: npt.NDArray[np.uint8]  # all file names one after the other
    name_offset: npt.NDArray[np.int64]
    labels_from: str  # "" when folders or class tars say the class, else which label file
    sums: BlockSums | None = None  # of the blocks of the tar
    tar_size: int = 0
    unit_sums: UnitSums | None = None  # of the units of the tar; format 1 has none

    def __len__(self) -> int:
        return len(self.offset)

    def name(self, i: int) -> str:
        """The file name of image i (n01440764_10026.JPEG)."""
        blob = self.names[self.name_offset[i] : self.name_offset[i + 1]]
        return blob.tobytes().decode("utf-8", "surrogateescape")


def pack_listing(
    listing: Listing,
    tar_size: int,
    sums: BlockSums | None,
    labels_from: str,
    unit_sums: UnitSums | None = None,
) -> dict[str, Any]:
    """The arrays of the file, apart from the two headers that tie it to its tar."""
    names, name_offset = _pack(listing.names)
    classes, class_offset = _pack(listing.classes)
    arrays: dict[str, Any] = {
        "format": np.int64(1 if unit_sums is None else 2),
        "tar_size": np.int64(tar_size),
        "offset": listing.offset,
        "size": listing.size,
        "label": listing.label,
        "names": names,
        "name_offset": name_offset,
        "classes": classes,
        "class_offset": class_offset,
        "labels_from": np.frombuffer(labels_from.encode() if listing.is_flat else b"", np.uint8),
    }
    if sums is not None:
        arrays |= {"block_size": np.int64(sums.block_size), f"block_{sums.kind}": sums.values}
    if unit_sums is not None:
        arrays["unit_version"] = np.int64(unit_sums.version)
        arrays["unit_size"] = np.int64(unit_sums.unit_size)
        arrays["unit_crc32"] = unit_sums.values
    return arrays


def _pack(names: Sequence[bytes]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    offsets = np.zeros(len(names) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, names), np.int64, len(names)), out=offsets[1:])
    return np.frombuffer(b"".join(names), np.uint8), offsets


def make_index(arrays: dict[str, Any], tar: Path) -> TarIndex:
    """The index that the arrays of a file describe."""
    bounds = arrays["class_offset"].tolist()
    classes = arrays["classes"].tobytes()
    return TarIndex(
        tar,
        arrays["offset"],
        arrays["size"],
        arrays["label"],
        [os.fsdecode(classes[a:b]) for a, b in itertools.pairwise(bounds)],
        arrays["names"],
        arrays["name_offset"],
        arrays["labels_from"].tobytes().decode(),
        _find_sums(arrays),
        int(arrays["tar_size"]),
        _find_unit_sums(arrays),
    )


def _find_unit_sums(arrays: dict[str, Any]) -> UnitSums | None:
    """The sums of the tar's units, if there are any."""
    if int(arrays["format"]) < 2:
        return None
    version, unit_size = int(arrays["unit_version"]), int(arrays["unit_size"])
    return UnitSums(version, unit_size, arrays["unit_crc32"])


def _find_sums(arrays: dict[str, Any]) -> BlockSums | None:
    """The sums of the tar's blocks, if there are any."""
    for kind in BLOCK_SIZES:
        values = arrays.get(f"block_{kind}")
        if values is not None:
            return BlockSums(kind, values)
    return None


def cut_as_summed(index: TarIndex) -> Units:
    """The units that an index has sums of; raises if it has none."""
    if index.unit_sums is None:
        raise UserError(f"the index of {index.tar} has no checksums of units")
    unit_size = index.unit_sums.unit_size
    units = cut_units(index.offset, index.size, index.label, index.tar_size, unit_size)
    if not index.unit_sums.belong_to(units):
        raise UserError(f"the index of {index.tar} has checksums of other units")
    return units


def write_whole(arrays: dict[str, Any], place: Path) -> None:
    """Writes the index, whole or not at all: jobs may build the same one at the same time."""
    with writing_whole(place, is_shared=True) as file:
        np.savez(file, **arrays)


def load_index(place: Path, tar: Path) -> TarIndex:
    """The index at a place; one that is damaged or belongs to another tar is refused."""
    arrays = _read(place)
    _check_belongs(arrays, place, tar)
    return _make_checked(arrays, place, tar)


def load_index_alone(place: Path) -> TarIndex:
    """The index at a place, for its layout alone: its tar need not be there."""
    return _make_checked(_read(place), place, place.with_suffix(""))


def _make_checked(arrays: dict[str, Any], place: Path, tar: Path) -> TarIndex:
    contradiction = _find_contradiction(arrays)
    if contradiction:
        raise DataError(f"{place} contradicts itself: {contradiction}; {_AGAIN.format(tar)}")
    return make_index(arrays, tar)


def load_by_size(place: Path, tar: Path, tar_size: int) -> TarIndex | None:
    """The index at a place, for a tar that is not here; None when it is none of that size."""
    try:
        arrays = _read(place)
    except (DataError, FileNotFoundError):
        return None
    is_of_it = int(arrays["tar_size"]) == tar_size and not _find_contradiction(arrays)
    return make_index(arrays, tar) if is_of_it else None


def _find_contradiction(arrays: dict[str, Any]) -> str:
    """What cannot be true of any tar, or an empty string; later code relies on this check."""
    tar_size, offset, size = int(arrays["tar_size"]), arrays["offset"], arrays["size"]
    label, num_classes = arrays["label"], len(arrays["class_offset"]) - 1
    if not len(size) == len(label) == len(offset) == len(arrays["name_offset"]) - 1 > 0:
        return "its lists have different lengths"
    if not (_divides(arrays["name_offset"], arrays["names"]) and num_classes > 0):
        return "the bounds of its names"
    if not _divides(arrays["class_offset"], arrays["classes"]):
        return "the bounds of its classes"
    if not ((label >= 0) & (label < num_classes)).all():
        return "a label without a class"
    if (np.diff(label) < 0).any():
        return "its images are not in the order of their classes"
    # In this order nothing can overflow.
    is_inside = (size > 0) & (size <= tar_size) & (offset > 0) & (offset <= tar_size - size)
    if not is_inside.all():
        return "an image outside of the tar"
    try:
        arrays["labels_from"].tobytes().decode()
    except UnicodeDecodeError:
        return "the name of its labels"
    sums = _find_sums(arrays)
    if sums is not None and (
        int(arrays.get("block_size", 0)) != sums.block_size
        or len(sums.values) != -(-tar_size // sums.block_size)
    ):
        return "the number of its checksums"
    is_second = int(arrays["format"]) == 2
    if any((name in arrays) != is_second for name in _OF_UNITS):
        return "its checksums of units"
    return ""


def _divides(bounds: npt.NDArray[np.int64], blob: npt.NDArray[np.uint8]) -> bool:
    """Whether bounds cut all of a blob into names that are not empty."""
    is_inside = bool(((bounds >= 0) & (bounds <= len(blob))).all())  # first: no overflow after it
    is_whole = bool(bounds[0] == 0 and bounds[-1] == len(blob))
    return is_inside and is_whole and bool((np.diff(bounds) > 0).all())


def belongs(place: Path, tar: Path) -> bool:
    """Whether the index at a place is whole and of this tar."""
    try:
        _check_belongs(_read(place), place, tar)
    except DataError:
        return False
    return True


def _read(place: Path) -> dict[str, Any]:
    """The arrays of the file, each of its own kind and shape."""
    with open(place, "rb") as raw:
        try:
            with zipfile.ZipFile(raw) as packed:
                if any(member.file_size > member.compress_size for member in packed.infolist()):
                    raise ValueError("a part of it would unpack to more than it is")
            with np.load(raw, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files if name in _FIELDS}
        except Exception as error:  # zipfile, zlib and numpy have a dozen kinds for damaged bytes
            raise DataError(f"{place} is damaged ({error}); index the tar again") from None
    for name, (kind, dimensions) in _FIELDS.items():
        if name not in arrays and name not in _OPTIONAL:
            raise DataError(f"{place} is damaged: it has no {name}; index the tar again")
        array = arrays.get(name)
        if array is not None and (array.dtype != kind or array.ndim != dimensions):
            found = f"{name} is {array.dtype} of {array.ndim} dimensions"
            raise DataError(f"{place} is damaged: {found}; index the tar again")
        if name == "format" and arrays["format"] not in FORMATS:
            formats = " and ".join(map(str, FORMATS))
            raise DataError(f"{place} has format {arrays['format']}, this code reads {formats}")
    return arrays


def _check_belongs(arrays: dict[str, Any], place: Path, tar: Path) -> None:
    with open(tar, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        first = os.pread(file.fileno(), BLOCK, 0)
        last = os.pread(file.fileno(), BLOCK, max(0, int(arrays["last_header_offset"])))
    if size != int(arrays["tar_size"]):
        why = f"the tar has {size} bytes, the indexed one had {int(arrays['tar_size'])}"
    elif first != arrays["first_header"].tobytes() or last != arrays["last_header"].tobytes():
        why = "the first or last header of the tar differs"
    else:
        return
    raise DataError(f"{place} does not belong to {tar}: {why}; {_AGAIN.format(tar)}")
