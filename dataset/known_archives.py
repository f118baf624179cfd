"""The published sizes and checksums of the real ILSVRC2012 archives, and hashing against them."""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dataset.errors import DataError, UserError
from dataset.names import TRAIN_TAR, VAL_TAR

_CHUNK = 4 << 20
_PUBLISHED_KINDS = ("md5", "sha256")


@dataclass(frozen=True)
class PublishedArchive:
    """One line of the table."""

    file: str
    num_bytes: int
    md5: str
    sha256: str
    num_classes: int
    num_images: int


@dataclass(frozen=True)
class Digest:
    """A checksum that a file must have."""

    kind: str
    hex: str
    source: str


class WrongDigest(DataError):
    """A file with another checksum than expected."""


# As published; run_results/published/ilsvrc2012_archives.csv has the same table with its source.
_TRAIN = PublishedArchive(
    TRAIN_TAR,
    147897477120,
    "1d675b47d978889d74fa0da5fadfb00e",
    "b08200a27a8e34218a0e58fde36b0fe8f73bc377f4acea2d91602057c3ca45bb",
    1000,
    1281167,
)
_VAL = PublishedArchive(
    VAL_TAR,
    6744924160,
    "29b22e2961454d5413ddabcf34fc5622",
    "c7e06a6c0baccf06d8dbeb6577d71efff84673a5dbdd50633ab44f8ea0456ae0",
    1000,
    50000,
)
# MD5 of an archive -> SHA-256 of the indexes that were made from exactly its bytes; none so far.
PROVEN_INDEXES: dict[str, frozenset[str]] = {}


def published_archives() -> dict[int, PublishedArchive]:
    """The real archives by their size, which is all that is needed to recognise one."""
    return {archive.num_bytes: archive for archive in (_TRAIN, _VAL)}


def find_published(name: str, size: int) -> PublishedArchive | None:
    """The real archive that has this name and size."""
    known = published_archives().get(size)
    return known if known and known.file == name else None


def recognise(archive: Path) -> PublishedArchive | None:
    """The real archive whose size a file has."""
    return published_archives().get(archive.stat().st_size)


def expected_digest(archive: Path, md5: str | None, verify: bool) -> Digest | None:
    """What to check a file against: --md5, or with --verify the sums of a real archive."""
    if md5 is not None:
        text = md5.strip().lower()
        if len(text) != 32 or text.strip("0123456789abcdef"):
            raise UserError(f"--md5 takes 32 hex digits, not {md5!r}; is it another kind of sum?")
        return Digest("md5", text, "--md5")
    if not verify:
        return None
    known = recognise(archive)
    if known is None:
        raise UserError(
            f"--verify knows no checksum of {archive} ({archive.stat().st_size} bytes): it is not "
            "one of the published ILSVRC2012 archives; give its own with --md5 HEX"
        )
    kind = fastest_kind()
    return Digest(kind, getattr(known, kind), f"the published sums of {known.file}")


@functools.cache
def fastest_kind() -> str:
    """md5 or sha256, whichever this processor computes faster (sha256 with SHA instructions)."""
    block = bytes(1 << 20)
    times = {}
    for kind in _PUBLISHED_KINDS:
        start_s = time.perf_counter()
        hashlib.new(kind, block, usedforsecurity=False)
        times[kind] = time.perf_counter() - start_s
    return min(_PUBLISHED_KINDS, key=times.__getitem__)


def check_digest(archive: Path, expected: Digest, stopped: Callable[[], bool]) -> None:
    """Reads all of a file and raises DataError if its checksum is wrong."""
    hasher = hashlib.new(expected.kind, usedforsecurity=False)
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    with open(archive, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while num := file.readinto(buffer):
            if stopped():
                return
            hasher.update(view[:num])
    if hasher.hexdigest() != expected.hex:
        raise WrongDigest(
            f"{archive} has the {expected.kind} {hasher.hexdigest()}, expected {expected.hex} "
            f"({expected.source}); fetch it again"
        )


class PublishedHash:
    """Hashes a published archive while it is read for something else; ignores any other file."""

    def __init__(self, archive: Path) -> None:
        known = find_published(archive.name, archive.stat().st_size)
        self._archive, self._wanted = archive, known.md5 if known else ""
        self._hasher = hashlib.md5(usedforsecurity=False)

    def update(self, data: bytes) -> None:
        if self._wanted:
            self._hasher.update(data)

    def check(self) -> None:
        """Raises DataError when the file is not the published one."""
        if self._wanted and self._hasher.hexdigest() != self._wanted:
            raise WrongDigest(
                f"{self._archive} has the md5 {self._hasher.hexdigest()}, and the published "
                f"archive of its name and size has {self._wanted}; fetch it again"
            )
