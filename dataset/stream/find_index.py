"""The index that a stream goes by: given, or beside the object; with a sum of every MiB."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from dataset.archive.block_sums import BLOCK_SIZE, KIND
from dataset.archive.index_file import load_index_alone
from dataset.errors import CommandError, DataError, describe_os_error
from dataset.federation.pelican import Target
from dataset.fetch.index_beside import fetch_index
from dataset.fetch.job import FetchJob
from dataset.fetch.ledger import Ledger
from dataset.fetch.object import fetch_object
from dataset.fetch.request import Request
from dataset.known_archives import PROVEN_INDEXES, find_published
from dataset.names import INDEX_SUFFIX


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
) -> FoundIndex:
    """The index of an object: a file or URL that was given, or the one beside the object.

    has_units: it must have a checksum for each unit, too.
    """
    try:
        place = (
            _get_given(given, request, ledger) if given else _get_beside(target, request, ledger)
        )
    except CommandError as error:
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


def _get_given(given: str, request: Request, ledger: Ledger) -> Path:
    if "://" not in given:
        return Path(given)
    target = request.parse(given)
    path = request.out / target.name
    fetch_object(FetchJob(target, path, ledger), request.access, request.options)
    return path


def _get_beside(target: Target, request: Request, ledger: Ledger) -> Path | None:
    path = request.out / (target.name + INDEX_SUFFIX)
    if not path.exists():
        fetch_index(target, path, request.access, request.options, ledger)
    return path if path.exists() else None
