"""The files of a zip, zip64 included: its directory by zipfile, the bytes by position."""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dataset.archive.listing import LabelNames, Listing, Split, find_in_tree, order_images
from dataset.archive.member_names import file_name, show
from dataset.errors import DataError

_LOCAL = struct.Struct("<4s2B4HL2L2H")
_ENCRYPTED, _UTF8 = 1, 0x800  # bits of a member's flags
_UNIX = 3  # the system whose modes tell a link


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
    infos = _read_infos(fd, path)
    names = [_raw_name(info) for info in infos]
    for name, info in zip(names, infos, strict=True):
        _check_member(name, info, path)
    facts = [(i.header_offset, i.compress_size, i.file_size, i.CRC, i.compress_type) for i in infos]
    table = np.array(facts, np.int64).reshape(-1, 5)
    return ZipDirectory(names, *(np.ascontiguousarray(table[:, i]) for i in range(5)))


def _read_infos(fd: int, path: Path) -> list[zipfile.ZipInfo]:
    """The directory as zipfile reads it.

    It is read once for an extraction: 10 s for Kaggle's two million members, where a parser of
    our own took 4 s.
    """
    with open(fd, "rb", closefd=False) as file:
        if not zipfile.is_zipfile(file):
            raise DataError(f"{path} is a truncated zip: its directory is missing; fetch it again")
        try:
            with zipfile.ZipFile(file) as archive:
                return [info for info in archive.infolist() if not info.is_dir()]
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        except Exception as error:  # BadZipFile, struct.error, UnicodeDecodeError and others
            reason = str(error) or type(error).__name__
            raise DataError(
                f"{path}: the zip's directory is damaged ({reason}); fetch it again"
            ) from None


def _raw_name(info: zipfile.ZipInfo) -> bytes:
    """The bytes of a name as they are in the zip, which zipfile has decoded."""
    return info.orig_filename.encode("utf-8" if info.flag_bits & _UTF8 else "cp437")


def _check_member(name: bytes, info: zipfile.ZipInfo, path: Path) -> None:
    kind = info.external_attr >> 28 if info.create_system == _UNIX else 0  # the type in its mode
    if kind not in (0, 0o10):
        raise DataError(f"{path}: {show(name)} is a link or a device; only plain files are read")
    if info.flag_bits & _ENCRYPTED:
        raise DataError(f"{path}: {show(name)} is encrypted; unpack it with its password first")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise DataError(
            f"{path}: {show(name)} is packed with method {info.compress_type}; repack it"
        )


def read_member(fd: int, directory: ZipDirectory, row: int, path: Path) -> bytes:
    """The bytes of one member, unpacked, its length and crc32 checked."""
    header, packed = int(directory.header[row]), int(directory.packed[row])
    local = _read(fd, _LOCAL.size, header, path)
    *_, name_len, extra_len = _LOCAL.unpack(local)
    if not local.startswith(b"PK\3\4"):
        raise DataError(f"{path}: no member at byte {header}; the zip is damaged: fetch it again")
    data = _read(fd, packed, header + _LOCAL.size + name_len + extra_len, path)
    size = int(directory.size[row])
    if int(directory.method[row]) == zipfile.ZIP_DEFLATED:
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
