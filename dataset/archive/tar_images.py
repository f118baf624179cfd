"""The images of an ILSVRC tar, whatever its shape: class tars in a tar, a tree, or flat (val)."""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np

from dataset.archive.listing import (
    Found,
    LabelNames,
    Listing,
    Problems,
    Split,
    check_outer_names,
    class_of_tar,
    find_in_class,
    find_in_tree,
    order_images,
)
from dataset.archive.member_names import show
from dataset.archive.tar_header import BLOCK, Pread, iter_tar
from dataset.archive.tar_walk import Entries, walk_tar, walk_tar_in_parts
from dataset.errors import DataError
from dataset.names import is_class_tar, is_hidden

# A header read slower than this comes from a disk or a server; many places are then read in
# parallel. From memory one thread is fastest, as threads would queue for the interpreter's lock.
_COLD_READ_S = 50e-6
_PROBES = 31
_COLD_THREADS = 32


def detect_kind(path: Path) -> Literal["tar", "gzip", "zip"]:
    """What a file is, by its first bytes; anything but an archive is refused."""
    with open(path, "rb") as file:
        return read_kind(file.read(BLOCK), path)


def read_kind(head: bytes, path: Path) -> Literal["tar", "gzip", "zip"]:
    """What a file is that begins with these 512 bytes."""
    if head.startswith(b"\x1f\x8b"):
        return "gzip"
    if head.startswith(b"PK"):
        return "zip"
    if not head:
        raise DataError(f"{path} is empty (0 bytes); fetch it again")
    # Loose on purpose: a damaged header is reported later as damage, with its position.
    is_tar = head[257:262] == b"ustar" or not head[100:136].translate(None, b"01234567 \0")
    if len(head) < BLOCK or not is_tar:
        raise DataError(
            f"{path} is not a tar, a .tar.gz or a zip (it starts with {head[:16]!r}); "
            "is it an error page or a damaged download?"
        )
    return "tar"


def list_tar(
    fd: int,
    path: Path,
    split: Split,
    label_names: LabelNames,
    pread: Pread | None = None,
    problems: Problems | None = None,
) -> Listing:
    """The images of an uncompressed tar; label_names gives the classes of a flat archive.

    If the caller gives a pread, it is called at growing positions only (block checksums are
    computed on the way); otherwise as many threads read the headers as the storage can use. With
    `problems` a bad class tar is noted there and skipped; without, it is an error.
    """
    try:
        entries, found, last_header = _walk(fd, path, split, pread, problems)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; is the disk failing?") from error
    return order_images(found, entries.offset, entries.size, label_names, path, last_header)


def _walk(
    fd: int, path: Path, split: Split, pread: Pread | None, problems: Problems | None
) -> tuple[Entries, Found, int]:
    """The entries of a tar, the images among them, and where the last outer header is."""
    direct = functools.partial(os.pread, fd)
    tar_size = os.fstat(fd).st_size
    nested = is_nested(direct, tar_size, path)
    threads = _COLD_THREADS if pread is None and _read_s(direct, tar_size) > _COLD_READ_S else 1
    if nested:
        outer = walk_tar(direct, 0, tar_size, str(path))
        entries, found = _walk_class_tars(outer, pread or direct, threads, path, problems)
    else:
        entries = outer = walk_tar_in_parts(pread or direct, tar_size, str(path), threads)
        found = find_in_tree(entries.names, split, path)
    return entries, found, int(outer.offset[-1]) - BLOCK


def _read_s(pread: Pread, tar_size: int) -> float:
    """Seconds that reading a header takes: the median over positions all over the tar."""
    times = []
    for place in range(_PROBES):
        start_s = time.perf_counter()
        pread(BLOCK, tar_size * place // _PROBES // BLOCK * BLOCK)
        times.append(time.perf_counter() - start_s)
    return statistics.median(times)


def is_nested(pread: Pread, tar_size: int, path: Path) -> bool:
    """Whether the first file that is not hidden is a tar: then all members are class tars."""
    for entry in iter_tar(pread, 0, tar_size, str(path)):
        if is_class_tar(entry.name) or not is_hidden(entry.name):
            return is_class_tar(entry.name)
    raise DataError(f"{path} holds no files; fetch it again")


def _walk_class_tars(
    outer: Entries, pread: Pread, threads: int, path: Path, problems: Problems | None
) -> tuple[Entries, Found]:
    """The images of the class tars inside the outer tar, each class named by its tar."""
    check_outer_names(outer.names, path)

    def walk(row: int) -> tuple[Entries, Found] | DataError:
        start, end = int(outer.offset[row]), int(outer.offset[row] + outer.size[row])
        what = f"{path}: {show(outer.names[row])}"
        try:
            entries = walk_tar(pread, start, end, what)
            found = find_in_class(class_of_tar(outer.names[row]), entries.names, what)
            check_sizes(found, entries, what)
            return entries, found
        except DataError as error:
            if problems is None:
                raise
            return error

    tars = [row for row, name in enumerate(outer.names) if is_class_tar(name)]
    if threads == 1:
        walked = [walk(row) for row in tars]
    else:
        with ThreadPoolExecutor(threads) as pool:
            walked = list(pool.map(walk, tars))
    good = [result for result in walked if not isinstance(result, DataError)]
    if problems is not None:
        problems += [str(result) for result in walked if isinstance(result, DataError)]
    if not good:
        raise DataError(f"{path}: none of its {len(tars)} class tars can be read")
    return join_classes(good, len(outer.names) - len(tars))


def check_sizes(found: Found, entries: Entries, what: str) -> None:
    """Refuses an image without bytes."""
    empty = np.flatnonzero(entries.size[found.row] == 0)
    if len(empty):
        raise DataError(f"{what}: {show(found.names[empty[0]])} is empty (0 bytes); fetch it again")


def join_classes(parts: Sequence[tuple[Entries, Found]], num_skipped: int) -> tuple[Entries, Found]:
    """The images of all class tars as one list."""
    entries = [part[0] for part in parts]
    founds = [part[1] for part in parts]
    starts = np.cumsum([0] + [len(entry.names) for entry in entries])
    return Entries(
        [],
        np.concatenate([entry.offset for entry in entries]),
        np.concatenate([entry.size for entry in entries]),
    ), Found(
        [found.classes[0] for found in founds],
        np.repeat(np.arange(len(founds), dtype=np.int32), [len(f.names) for f in founds]),
        [name for found in founds for name in found.names],
        np.concatenate([f.row + start for f, start in zip(founds, starts, strict=False)]),
        num_skipped + sum(found.num_skipped for found in founds),
    )
