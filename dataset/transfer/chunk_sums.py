"""Verifies a file: by the block checksums of TAR.index, and by hashes of what arrives."""

from __future__ import annotations

import os
import re
import struct
import threading
import zipfile
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dataset import checksum
from dataset.transfer.journal import CHUNK, chunk_length, num_chunks

_KINDS = ("crc32", "crc32c")  # of an index: today's, and that of earlier versions


class NoChecks(Exception):
    """An index without block checksums for this object."""


class NoIndex(NoChecks):
    """There is no index at all."""


class OtherTar(NoChecks):
    """The index is that of an archive of another size."""


@dataclass(frozen=True)
class BlockChecks:
    """The sum of every block of the object, from an index made with --checksums."""

    block_size: int
    values: Sequence[int]
    where: str
    kind: str

    def block_of(self, chunk: int) -> int:
        return chunk * CHUNK // self.block_size

    def chunks_of(self, block: int, num_chunks: int) -> range:
        per_block = self.block_size // CHUNK
        return range(block * per_block, min((block + 1) * per_block, num_chunks))


def read_block_checks(index: Path, size: int) -> BlockChecks:
    """The checks of an index; NoChecks says why there are none. Reads the .npz without numpy."""
    if not index.is_file():
        raise NoIndex(f"no file {index.name}")
    try:
        with zipfile.ZipFile(index) as archive:
            kind = next((k for k in _KINDS if f"block_{k}.npy" in archive.namelist()), None)
            if kind is None:
                raise NoChecks(f"{index.name} has no block checksums")
            block_size = _read_npy(archive.open("block_size.npy"), 1)[0]
            tar_size = _read_npy(archive.open("tar_size.npy"), 1)[0]
            values = _read_npy(archive.open(f"block_{kind}.npy"), num_chunks(size))
    except NoChecks:
        raise
    except Exception as error:  # zipfile, zlib and struct raise many kinds of error
        reason = str(error) or type(error).__name__
        raise NoChecks(f"{index.name} cannot be read ({reason})") from None
    if tar_size != size:
        raise OtherTar(f"{index.name} is for {tar_size} bytes, the object has {size}")
    if block_size <= 0 or block_size % CHUNK or len(values) != -(-size // block_size):
        raise NoChecks(f"{index.name} has blocks of {block_size} bytes, not of whole MiB")
    if not checksum.can_compute(kind):
        raise NoChecks(
            f"{index.name} has {kind} checksums, but the {kind} package is not installed"
        )
    return BlockChecks(block_size, values, index.name, kind)


_ARRAY_CODES = {b"<u4": "I", b"<u8": "Q", b"<i8": "q", b"<i4": "i", b"|u1": "B"}
_DESCR = re.compile(rb"'descr': *'([^']*)'")
MAX_HEAD = 4096  # ours have 118 bytes


def _read_npy(file: IO[bytes], max_values: int) -> Sequence[int]:
    """The integers of a .npy file of one dimension or none, and no more of them than asked for."""
    with file:
        magic = file.read(8)
        if magic[:6] != b"\x93NUMPY":
            raise ValueError("not an array")
        wide = magic[6] > 1
        (length,) = struct.unpack("<I" if wide else "<H", file.read(4 if wide else 2))
        descr = _DESCR.search(file.read(min(length, MAX_HEAD)))
        if length > MAX_HEAD or descr is None or descr[1] not in _ARRAY_CODES:
            raise ValueError("not an array of integers")
        values = array(_ARRAY_CODES[descr[1]])
        data = file.read(max_values * values.itemsize + 1)
        if len(data) > max_values * values.itemsize:
            raise ValueError(f"more than {max_values} values")
        values.frombytes(data)
        if struct.pack("=H", 1) != struct.pack("<H", 1):
            values.byteswap()
        return values


class ChunkSums:
    """The checksums of all chunks, one array a kind; combined into those of longer pieces."""

    def __init__(self, kinds: Sequence[str], size: int, num_chunks: int) -> None:
        self.kinds = tuple(kinds)
        self.size = size
        self._values = {kind: array("L", bytes(array("L").itemsize * num_chunks)) for kind in kinds}

    def set(self, chunk: int, values: Sequence[int]) -> None:
        for kind, value in dict(enumerate(values)).items():
            self._values[self.kinds[kind]][chunk] = value

    def get(self, chunk: int) -> tuple[int, ...]:
        return tuple(self._values[kind][chunk] for kind in self.kinds)

    def of_chunks(self, kind: str, chunks: range) -> int:
        """The checksum of a run of chunks."""
        values = self._values[kind]
        return checksum.combine_all(kind, ((values[n], chunk_length(n, self.size)) for n in chunks))


def compute_all(kinds: Sequence[str], view: memoryview) -> tuple[int, ...]:
    return tuple(checksum.compute(kind, view) for kind in kinds)


def hash_file(fd: int, kind: str, size: int) -> str:
    """md5 or sha256 (or a combinable kind) of a whole file, read once more."""
    follower = PrefixHash(fd, [kind])
    follower.advance(size)
    return follower.hexdigests()[kind]


class PrefixHash:
    """md5 and sha256 of the contiguous prefix of a growing file."""

    def __init__(self, fd: int, kinds: Sequence[str]) -> None:
        self._fd = fd
        self._hashes = {kind: checksum.new_hash(kind) for kind in kinds if kind in checksum.HASHES}
        self._sums = {kind: checksum.start(kind) for kind in kinds if kind not in checksum.HASHES}
        self._buffer = bytearray(CHUNK)
        self.position = 0

    def advance(self, end: int, stop: threading.Event | None = None) -> None:
        """Takes in the bytes up to `end`, which are there and right."""
        view = memoryview(self._buffer)
        while self.position < end and not (stop is not None and stop.is_set()):
            wanted = min(CHUNK, end - self.position)
            got = os.preadv(self._fd, [view[:wanted]], self.position)
            if got <= 0:
                raise OSError(f"the file ends at {self.position}, before {end}")
            for hashed in self._hashes.values():
                hashed.update(view[:got])
            for kind, value in self._sums.items():
                piece = checksum.compute(kind, view[:got])
                self._sums[kind] = checksum.combine(kind, value, piece, got)
            self.position += got

    def hexdigests(self) -> dict[str, str]:
        found = {kind: hashed.hexdigest() for kind, hashed in self._hashes.items()}
        for kind, value in self._sums.items():
            found[kind] = checksum.to_hex(kind, value)
        return found
