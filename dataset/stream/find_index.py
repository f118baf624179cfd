"""The index that a stream goes by: given, or beside the object; with a sum of every MiB."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from dataset.archive.block_sums import BLOCK_SIZE, KIND
from dataset.archive.index_file import load_index_alone
from dataset.errors import CommandError, DataError, PassingError, UserError, describe_os_error
from dataset.federation.pelican import Target
from dataset.fetch.index_beside import ask_index_size, fetch_index
from dataset.fetch.job import FetchJob
from dataset.fetch.ledger import Ledger
from dataset.fetch.object import fetch_object
from dataset.fetch.request import Request
from dataset.known_archives import PROVEN_INDEXES, find_published
from dataset.names import INDEX_SUFFIX
from dataset.redaction import redact
from dataset.spelling import decode

NUM_TRIES = 3  # a stream cannot do without it: one server that fails does not mean there is none


@dataclass(frozen=True)
class FoundIndex:
    """Where the index of an object is, or why there is none that can be used."""

    path: Path | None
    reason: str = ""


def find_index(
    target: Target,
    size: int,
    request: Request,
    ledger: Ledger,
    given: str = "",
    has_units: bool = False,
    is_needed: bool = False,
) -> FoundIndex:
    """The index of an object: a file or URL that was given, or the one beside the object.

    One that was given and is of no use is the user's mistake: a whole fetch would hide it.
    has_units: it must have a checksum for each unit, too. is_needed: a whole fetch will not do
    instead, so if nobody answers whether there is one, that is a passing failure.
    """
    if given:
        return FoundIndex(_get_given(given, target, size, request, ledger, has_units))
    try:
        place = _get_beside(target, size, request, ledger, has_units, is_needed)
    except CommandError as error:
        if is_needed and isinstance(error, PassingError):
            raise
        return FoundIndex(None, str(error))
    if place is None:
        return FoundIndex(None, f"there is no {target.name}{INDEX_SUFFIX} beside {target.identity}")
    reason = find_fault(place, size, has_units)
    return FoundIndex(None if reason else place, reason)


def find_fault(place: Path, size: int, has_units: bool = False) -> str:
    """Why an index is of no use for a stream of an object of this size; empty if it is."""
    try:
        index = load_index_alone(place)
    except DataError as error:
        return str(error)
    except OSError as error:
        return describe_os_error(error) or str(error)
    if index.tar_size != size:
        return f"{place} is for {index.tar_size} bytes, the object has {size}"
    if index.sums is None:
        return f"{place} has no checksums"
    if index.sums.kind != KIND:
        blocks = f"{index.sums.block_size >> 20} MiB, not of {BLOCK_SIZE >> 20}"
        return f"{place} has the checksums of earlier versions ({index.sums.kind} of {blocks})"
    if has_units and index.unit_sums is None:
        return (
            f"{place} has no checksums of units: it is of format 1, or there are other files "
            "between the images of the tar"
        )
    return ""


def is_proven(place: Path, name: str, size: int) -> bool:
    """Whether an index is known to be that of the published archive of this name and size."""
    known = find_published(name, size)
    proven = PROVEN_INDEXES.get(known.md5, frozenset()) if known is not None else frozenset()
    return bool(proven) and hashlib.sha256(place.read_bytes()).hexdigest() in proven


def _get_given(
    given: str, target: Target, size: int, request: Request, ledger: Ledger, has_units: bool
) -> Path:
    path = Path(given)
    if "://" in given:
        index = request.parse(given)
        if not index.name.endswith(INDEX_SUFFIX):  # a tar would be fetched whole
            raise UserError(f"--index {redact(given)}: give the URL of a TAR{INDEX_SUFFIX}")
        path = request.out / index.name
        if _is_faulty(path, size, ledger, has_units) and _may_be_new(path, index, size, request):
            path.unlink()
        fetch_object(FetchJob(index, path, ledger), request.access, request.options)
    if reason := find_fault(path, size, has_units):
        fix = f"give --index the index of {target.identity}, or leave it out"
        raise UserError(f"{reason}; {fix}")
    return path


def _get_beside(
    target: Target, size: int, request: Request, ledger: Ledger, has_units: bool, is_needed: bool
) -> Path | None:
    path = request.out / (target.name + INDEX_SUFFIX)
    if _is_faulty(path, size, ledger, has_units):
        beside = target.child(target.path + INDEX_SUFFIX)
        if _may_be_new(path, beside, size, request, is_needed):
            path.unlink()
    if not path.exists():
        fetch_index(target, path, request.access, request.options, ledger, NUM_TRIES, is_needed)
    return path if path.exists() else None


def _is_faulty(path: Path, size: int, ledger: Ledger, has_units: bool) -> bool:
    """Whether an earlier start fetched this index, and it is of no use."""
    return ledger.vouches_for(path) and bool(find_fault(path, size, has_units))


def _may_be_new(
    path: Path, source: Target, size: int, request: Request, is_needed: bool = False
) -> bool:
    """Whether an index of no use may have been replaced at its source since it was fetched.

    One that only lacks checksums is longer with them, so of the same length it is the same.
    """
    try:
        if load_index_alone(path).tar_size != size:
            return True
    except (DataError, OSError):
        return True
    if source.scheme == "file":
        place = Path(decode(source.path))
        there = place.stat().st_size if place.is_file() else 0
    else:
        there = ask_index_size(source, request.access, request.options, NUM_TRIES, is_needed)
    return there not in (0, path.stat().st_size)
