"""Reads the headers of one tar from many positions at once, for storage with slow reads."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from dataset.archive.tar_header import BLOCK, Pread, read_entry
from dataset.archive.tar_walk import Entries, LostTheChain, find_headers, walk_tar
from dataset.errors import DataError

_MIN_PART = 8 << 20  # fewer bytes than this are not worth a thread
_SCAN = 1 << 20
_MAX_SCAN = 64 << 20  # a larger image hides the next header; two parts then become one


def walk_tar_in_parts(pread: Pread, size: int, what: str, threads: int) -> Entries:
    """The files of a tar, as walk_tar gives them, from parts that are walked in parallel.

    The tar is cut evenly, and a part starts at the first header after its cut. Bytes inside a
    file may look like a header, so every part must end exactly where the next one starts. If one
    does not, or anything else is wrong, the tar is walked once more from its start.
    """
    num_parts = min(threads, size // _MIN_PART)
    if num_parts > 1:
        cuts = [size * part // num_parts // BLOCK * BLOCK for part in range(1, num_parts)]
        with ThreadPoolExecutor(num_parts) as pool:
            found = pool.map(lambda cut: find_entry(pread, cut, size, what), cuts)
            starts = [0, *sorted({start for start in found if start is not None}), None]
            try:
                parts = list(
                    pool.map(
                        lambda part: walk_tar(pread, part[0], size, what, stop=part[1]),
                        itertools.pairwise(starts),
                    )
                )
                return _join(parts)
            except (DataError, LostTheChain):
                pass
    return walk_tar(pread, 0, size, what)


def find_entry(pread: Pread, position: int, end: int, what: str) -> int | None:
    """Where an entry starts after a position; None when no header is near.

    The first header found may belong to an entry that began earlier, with a record of its long
    name. So the start of the next entry is returned.
    """
    for start in range(position, min(end, position + _MAX_SCAN), _SCAN):
        for place in find_headers(pread(_SCAN, start)):
            try:
                entry = read_entry(pread, start + place, end, what)
            except DataError:
                continue
            return entry.end if entry is not None and entry.end < end else None
    return None


def _join(parts: list[Entries]) -> Entries:
    return Entries(
        [name for part in parts for name in part.names],
        np.concatenate([part.offset for part in parts]),
        np.concatenate([part.size for part in parts]),
    )
