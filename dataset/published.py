"""The published facts of the real ILSVRC2012 archives, and a file hashed beside other work."""

from __future__ import annotations

import csv
import functools
import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dataset.errors import DataError, UserError

_TABLE = Path(__file__).with_name("ilsvrc2012_archives.csv")
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
    """A file that is not what its checksum says."""


@functools.cache
def published_archives() -> dict[int, PublishedArchive]:
    """The real archives by their size, which is all that is needed to recognise one."""
    with open(_TABLE, newline="") as file:
        rows = [
            PublishedArchive(
                row["file"],
                int(row["bytes"]),
                row["md5"],
                row["sha256"],
                int(row["classes"]),
                int(row["images"]),
            )
            for row in csv.DictReader(file)
        ]
    return {row.num_bytes: row for row in rows}


def recognise(archive: Path) -> PublishedArchive | None:
    """The real archive that a file claims to be by its size."""
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
    """Reads a file through and raises DataError when its checksum is another one."""
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
