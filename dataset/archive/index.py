"""The index of a tar: found, built and checked, so that training reads the tar in place."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dataset.archive.block_sums import BlockSummer, BlockSums, CountBytes, find_bad_ranges
from dataset.archive.index_file import (
    TarIndex,
    belongs,
    load_index,
    make_index,
    pack_listing,
    write_whole,
)
from dataset.archive.labels import find_labels, label_val
from dataset.archive.listing import Listing, Split
from dataset.archive.tar_header import BLOCK
from dataset.archive.tar_images import detect_kind, list_tar
from dataset.archive.unit_sums import PrefixSums, UnitSums, has_current_sums, sum_units
from dataset.errors import DataError, UserError
from dataset.known_archives import PublishedHash
from dataset.names import INDEX_SUFFIX, is_of_val
from dataset.words import count

_BUILTIN = "built-in"
_log = logging.getLogger("trainyard.index")


def find_or_build_index(
    tar: Path,
    *,
    index_dir: Path | None = None,
    labels: Path | None = None,
    checksums: bool = False,
) -> TarIndex:
    """The index of a tar: in index_dir, else beside it, else in the user's cache, else built."""
    index = find_current(tar, index_dir=index_dir, labels=labels, checksums=checksums)
    if index is not None:
        return index
    _log.info("%s has no index yet: making it, once", tar)
    index, place = build_index(tar, index_dir=index_dir, labels=labels, checksums=checksums)
    classes = count(len(index.classes), "class", "classes")
    _log.info("%s of %s: %s", count(len(index), "image"), classes, place)
    return index


def find_current(
    tar: Path, *, index_dir: Path | None, labels: Path | None, checksums: bool
) -> TarIndex | None:
    """The index that there is, when it has what is asked for: these labels, checksums."""
    place = find_index(tar, index_dir)
    if place is None:
        return None
    index = load_index(place, tar)
    return index if suffices(index, labels, checksums) else None


def suffices(index: TarIndex, labels: Path | None, checksums: bool) -> bool:
    """Whether an index has what is asked for."""
    wanted = labels_digest(index.tar, labels)
    has_labels = not index.labels_from or not wanted or index.labels_from == wanted
    if not checksums:
        return has_labels
    has_sums = index.sums is not None and index.sums.can_check
    places = index.offset, index.size, index.label, index.tar_size
    return has_labels and has_sums and has_current_sums(index.unit_sums, *places)


def find_index(tar: Path, index_dir: Path | None = None) -> Path | None:
    """Where the index of a tar is, or None; a cached index of an older tar does not count.

    An index of an older tar in a read-only folder does not hide the one made in its place.
    """
    *named, cached = index_places(tar, index_dir)
    there = [place for place in (*named, cached) if place.is_file()]
    if len(there) == 1 and cached not in there:
        return there[0]  # loading it tells why, if it is refused
    fitting = (place for place in there if belongs(place, tar))
    refused = (place for place in there if place != cached)
    return next(fitting, None) or next(refused, None)


def index_places(tar: Path, index_dir: Path | None = None) -> list[Path]:
    """The places of a tar's index in the order of looking; the last one is the user's cache."""
    name = tar.name + INDEX_SUFFIX
    digest = hashlib.sha256(os.fsencode(tar.resolve())).hexdigest()[:16]
    named = ([index_dir / name] if index_dir else []) + [tar.with_name(name)]
    return [*named, user_cache() / "index" / f"{digest}-{name}"]


def user_cache() -> Path:
    """The user's cache folder; a slot on the grid may have only a scratch folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "trainyard"
    home = os.environ.get("HOME")
    if home and os.access(home, os.W_OK):
        return Path(home) / ".cache" / "trainyard"
    return Path(tempfile.gettempdir()) / f"trainyard-{os.getuid()}"


def build_index(
    tar: Path,
    *,
    index_dir: Path | None = None,
    labels: Path | None = None,
    checksums: bool = False,
    split: Split | None = None,
    progress: CountBytes = lambda num_bytes: None,
) -> tuple[TarIndex, Path]:
    """The index of a tar and where it was written."""
    check_kind(detect_kind(tar), tar)
    split = split or guess_split(tar)
    fd = os.open(tar, os.O_RDONLY | os.O_CLOEXEC)
    try:
        label_names = partial(label_val, archive=tar, labels=labels)
        size, sums, unit_sums = os.fstat(fd).st_size, None, None
        if checksums:
            hasher, prefix = PublishedHash(tar), PrefixSums()
            with BlockSummer(fd, size, progress, hasher, prefix=prefix) as summer:
                listing = list_tar(fd, tar, split, label_names, summer.pread)
                sums = summer.finish()
            hasher.check()
            unit_sums = sum_units(listing.offset, listing.size, listing.label, size, prefix, fd)
        else:
            listing = list_tar(fd, tar, split, label_names)
        headers = os.pread(fd, BLOCK, 0), os.pread(fd, BLOCK, listing.last_header)
        arrays = pack_index(listing, size, sums, name_labels(tar, labels), headers, unit_sums)
    finally:
        os.close(fd)
    return make_index(arrays, tar), _write(arrays, tar, index_dir)


def check_kind(kind: str, tar: Path) -> None:
    """Refuses an archive in which images cannot be read in place."""
    if kind != "tar":
        raise UserError(
            f"{tar} is a {kind} file, and an index needs an uncompressed tar; extract it with "
            "scripts/extract_ILSVRC_mp.py" + ("" if kind == "zip" else " or gunzip it first")
        )


def pack_index(
    listing: Listing,
    size: int,
    sums: BlockSums | None,
    labels_from: str,
    headers: tuple[bytes, bytes],
    unit_sums: UnitSums | None = None,
) -> dict[str, Any]:
    """The arrays of the file; `headers` are the first and the last one of the outer tar."""
    arrays = pack_listing(listing, size, sums, labels_from, unit_sums)
    arrays["first_header"] = np.frombuffer(headers[0], np.uint8)
    arrays["last_header"] = np.frombuffer(headers[1], np.uint8)
    arrays["last_header_offset"] = np.int64(listing.last_header)
    return arrays


def guess_split(tar: Path) -> Split:
    """The split of an archive by its name; only archives that hold both need it."""
    return "val" if is_of_val(tar.name) else "train"


def labels_digest(tar: Path, labels: Path | None) -> str:
    """A hash of the label file that would be used now; empty without one."""
    source = labels or find_labels(tar.parent)
    return hashlib.sha256(source.read_bytes()).hexdigest() if source else ""


def name_labels(tar: Path, labels: Path | None) -> str:
    """What the labels of a flat tar come from, as the index tells it."""
    return labels_digest(tar, labels) or _BUILTIN


def _write(arrays: dict[str, Any], tar: Path, index_dir: Path | None) -> Path:
    """Writes the index into index_dir when given, else beside the tar, else into the cache."""
    problems = []
    for place in index_places(tar, index_dir):
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            write_whole(arrays, place)
            return place
        except OSError as error:
            problems.append(f"{place.parent} ({error.strerror})")
    raise UserError(f"the index cannot be written to {', '.join(problems)}; give --index-dir")


def verify_tar(index: TarIndex, progress: CountBytes = lambda num_bytes: None) -> None:
    """Raises DataError with the byte ranges of the tar that differ from the index's sums."""
    if index.sums is None:
        raise UserError(
            f"the index of {index.tar} has no checksums; write them when the tar is known to be "
            f"good: python scripts/index_tar.py --checksums {index.tar}"
        )
    fd = os.open(index.tar, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        bad = list(find_bad_ranges(fd, size, index.sums, progress))
    finally:
        os.close(fd)
    if bad:
        shown = ", ".join(f"{start}-{end - 1}" for start, end in bad[:5])
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise DataError(f"{index.tar} is damaged in the bytes {shown}{more}; fetch it again")
