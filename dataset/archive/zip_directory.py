"""The central directory of a zip, zip64 included, and the bytes of its members."""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dataset.archive.listing import LabelNames, Listing, Split, find_in_tree, order_images
from dataset.archive.member_names import file_name, show
from dataset.errors import DataError

_END = struct.Struct("<4s4H2LH")  # end of central directory
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s4B4HL2L5H2L")
_LOCAL = struct.Struct("<4s2B4HL2L2H")
_STORED, _DEFLATED = 0, 8
_ENCRYPTED = 1
_FULL_32, _FULL_16 = 0xFFFFFFFF, 0xFFFF  # "the number is in the zip64 field"


@dataclass(frozen=True)
class ZipDirectory:
    """All files of a zip, in the order of its directory."""

    names: list[bytes]
    header: npt.NDArray[np.int64]  # where the local header is
    packed: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]
    crc32: npt.NDArray[np.int64]
    method: npt.NDArray[np.int64]


def read_directory(fd: int, path: Path) -> ZipDirectory:
    """The files of a zip; folders are left out, links and encrypted members refused."""
    start, length, count = _find_directory(fd, path)
    blob = _read(fd, length, start, path)
    names: list[bytes] = []
    facts: list[tuple[int, int, int, int, int]] = []
    position = 0
    for _ in range(count):
        if position + _CENTRAL.size > len(blob) or blob[position : position + 4] != b"PK\1\2":
            raise DataError(f"{path}: the zip's directory is damaged at entry {len(names)}")
        (_, _, system, _, _, flags, method, _, _, crc, packed, size, name_len, extra_len,
         comment_len, _, _, attributes, header) = _CENTRAL.unpack_from(blob, position)  # fmt: skip
        name = blob[position + _CENTRAL.size : position + _CENTRAL.size + name_len]
        extra_start = position + _CENTRAL.size + name_len
        if _FULL_32 in (packed, size, header):
            extra = blob[extra_start : extra_start + extra_len]
            size, packed, header = _read_zip64(extra, size, packed, header, path)
        position = extra_start + extra_len + comment_len
        if name.endswith(b"/"):
            continue
        _check_member(name, system, flags, method, attributes, path)
        names.append(name)
        facts.append((header, packed, size, crc, method))
    table = np.array(facts, np.int64).reshape(-1, 5)
    return ZipDirectory(names, *(np.ascontiguousarray(table[:, i]) for i in range(5)))


def _check_member(
    name: bytes, system: int, flags: int, method: int, attributes: int, path: Path
) -> None:
    kind = attributes >> 28 if system == 3 else 0  # the file type of a Unix mode
    if kind not in (0, 0o10):
        raise DataError(f"{path}: {show(name)} is a link or a device; only plain files are read")
    if flags & _ENCRYPTED:
        raise DataError(f"{path}: {show(name)} is encrypted; unpack it with its password first")
    if method not in (_STORED, _DEFLATED):
        raise DataError(f"{path}: {show(name)} is packed with method {method}; repack it")


def _find_directory(fd: int, path: Path) -> tuple[int, int, int]:
    """Start, length and number of entries of the central directory."""
    size = os.fstat(fd).st_size
    tail_start = max(0, size - _END.size - 0xFFFF)
    tail = os.pread(fd, size - tail_start, tail_start)
    place = tail.rfind(b"PK\5\6")
    if place < 0 or place + _END.size > len(tail):
        raise DataError(f"{path} is a truncated zip: its directory is missing; fetch it again")
    _, disk, _, _, count, length, start, _ = _END.unpack_from(tail, place)
    if _FULL_32 in (length, start) or count == _FULL_16:
        locator_start = tail_start + place - _END64_LOCATOR.size
        locator = _read(fd, _END64_LOCATOR.size, locator_start, path)
        magic, _, end64, _ = _END64_LOCATOR.unpack(locator)
        record = _read(fd, _END64.size, end64, path) if magic == b"PK\6\7" else b""
        if not record.startswith(b"PK\6\6"):
            raise DataError(f"{path}: the zip's directory is damaged; fetch it again")
        *_, count, length, start = _END64.unpack(record)
    if start + length > size or disk not in (0, _FULL_16):
        raise DataError(f"{path} is a truncated or a split zip; fetch it again")
    return start, length, count


def _read_zip64(
    extra: bytes, size: int, packed: int, header: int, path: Path
) -> tuple[int, int, int]:
    """(size, packed, header) with those that did not fit 32 bits taken from the extra field."""
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<2H", extra)
        if kind == 1:
            numbers = list(struct.unpack(f"<{length // 8}Q", extra[4 : 4 + length // 8 * 8]))
            wanted = [size, packed, header]
            if len(numbers) < wanted.count(_FULL_32):
                break
            size, packed, header = (numbers.pop(0) if n == _FULL_32 else n for n in wanted)
            return size, packed, header
        extra = extra[4 + length :]
    raise DataError(f"{path}: a large zip member without its zip64 field; fetch it again")


def read_member(fd: int, directory: ZipDirectory, row: int, path: Path) -> bytes:
    """The bytes of one member, unpacked, its length and crc32 checked."""
    header, packed = int(directory.header[row]), int(directory.packed[row])
    local = _read(fd, _LOCAL.size, header, path)
    *_, name_len, extra_len = _LOCAL.unpack(local)
    if not local.startswith(b"PK\3\4"):
        raise DataError(f"{path}: no member at byte {header}; the zip is damaged: fetch it again")
    data = _read(fd, packed, header + _LOCAL.size + name_len + extra_len, path)
    size = int(directory.size[row])
    if int(directory.method[row]) == _DEFLATED:
        try:
            data = zlib.decompressobj(-15).decompress(data, size + 1)
        except zlib.error as error:
            raise _damaged(directory, row, path, str(error)) from None
    if len(data) != size or zlib.crc32(data) != int(directory.crc32[row]):
        raise _damaged(directory, row, path, f"{len(data)} bytes, crc32 {zlib.crc32(data):08x}")
    return data


def _damaged(directory: ZipDirectory, row: int, path: Path, why: str) -> DataError:
    expected = f"{int(directory.size[row])} bytes, crc32 {int(directory.crc32[row]):08x}"
    name = show(directory.names[row])
    return DataError(f"{path}: {name} is damaged ({why}; expected {expected}); fetch it again")


def _read(fd: int, length: int, offset: int, path: Path) -> bytes:
    parts: list[bytes] = []
    missing = length
    while missing and offset >= 0:  # one read gives 2 GiB at most
        try:
            parts.append(os.pread(fd, missing, offset + length - missing))
        except OSError as error:
            raise DataError(f"{path} cannot be read at byte {offset}: {error.strerror}") from error
        if not parts[-1]:
            break
        missing -= len(parts[-1])
    if missing:
        raise DataError(f"{path} is truncated: {length} bytes expected at byte {offset}")
    return b"".join(parts)


def list_zip(directory: ZipDirectory, path: Path, split: Split, label_names: LabelNames) -> Listing:
    """The images of one split of a zip; offset is that of the local header."""
    found = find_in_tree(directory.names, split, path)
    return order_images(found, directory.header, directory.size, label_names, path)


def find_member(directory: ZipDirectory, name: bytes) -> int | None:
    """The row of the member with a file name, such as the labels inside Kaggle's zip."""
    rows = [row for row, member in enumerate(directory.names) if file_name(member) == name]
    return rows[0] if rows else None
