"""What a stream of a URL takes: its objects, their index, and room on the disk."""

from __future__ import annotations

import logging
import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dataset.archive.index_file import TarIndex, load_by_size
from dataset.errors import DataError
from dataset.federation.collection import has_collection_form, looks_like_object
from dataset.federation.lookup import Lookup, Options
from dataset.federation.pelican import Target
from dataset.federation.reach import check_network
from dataset.fetch.job import FetchJob
from dataset.fetch.ledger import (
    PLANNING,
    FolderHeld,
    Ledger,
    NoSpace,
    check_space_of_all,
    take_folder,
)
from dataset.fetch.object import fetch_object
from dataset.fetch.request import Request
from dataset.fetch.size import find_size
from dataset.fetch.urls import list_top
from dataset.names import TRAIN_TAR, VAL_TAR, VALPREP, split_urls
from dataset.own_names import check_distinct, check_names, part_path
from dataset.redaction import redact
from dataset.spelling import decode
from dataset.stream.find_index import FoundIndex, find_index, is_proven

log = logging.getLogger("trainyard.fetch")

SOON_S = 24 * 3600.0  # a token that expires within this time is told of


@dataclass(frozen=True)
class PlannedObject:
    """One object: from where, to where, and what is known of it."""

    url: str
    path: Path
    size: int
    is_here: bool = False  # whole, by the record of the folder
    index: Path | None = None  # with the sums of its 1 MiB blocks
    is_proven: bool = False  # the index is known to be that of the published archive

    def load_index(self) -> TarIndex:
        """Its index, which it must have."""
        assert self.index is not None
        found = load_by_size(self.index, self.path, self.size)
        if found is None:
            raise DataError(f"{self.index} is not the index of {self.url}; remove it")
        return found


@dataclass(frozen=True)
class StreamPlan:
    """A stream that can begin; `data` is what a training opens once all is here."""

    data: Path
    train: PlannedObject
    val: PlannedObject | None = None
    # Only a part of the train tar is on the disk at a time.
    is_bounded: bool = field(default=False, kw_only=True)

    @property
    def is_here(self) -> bool:
        """Whether nothing has to come."""
        return self.train.is_here and (self.val is None or self.val.is_here)


@dataclass(frozen=True)
class Refusal:
    """Why there can be no stream, and the command that would change it, if there is one."""

    reason: str
    command: str = ""
    is_passing: bool = False  # another process has the folder for now

    def __str__(self) -> str:
        return self.reason + (f"; to stream it, run: {self.command}" if self.command else "")


def plan_stream(
    url: str,
    data_dir: Path,
    *,
    index: str = "",
    federation: str | None = None,
    token: Path | None = None,
    options: Options | None = None,
    is_bounded: bool = False,
    index_alone: bool = False,
) -> StreamPlan | Refusal:
    """How to stream a URL into a folder; a Refusal says in words why that cannot be.

    The URL is that of a tar, or of a folder with the two of ILSVRC2012; or there are two, those of
    a train and a val tar, with a comma between. `index` is the file or URL of the train tar's.
    The folder is held meanwhile: another stream there ends this one at once (exit 2), unless all
    is here already; a fetch there is waited for by whoever fetches whole.
    is_bounded: only a part of the train tar will be on the disk at a time. index_alone: nothing of
    it will; only its index is read.
    """
    request = Request(data_dir, options or Options(), federation, token)
    urls = split_urls(url)
    targets = [request.parse(one) for one in urls]
    _check_all_names(targets, request)
    if _is_folder(targets[0]) and len(urls) == 1:
        return _plan_folder(url, targets[0], request, index, is_bounded)
    data = data_dir if len(urls) > 1 else data_dir / targets[0].name
    here = _find_here(urls, request)
    if here is not None:  # nobody has to hold the folder for it
        return StreamPlan(data, *here)
    try:
        with take_folder(data_dir, PLANNING):
            ledger = Ledger(data_dir)
            return _plan_objects(urls, data, request, ledger, index, is_bounded, index_alone)
    except FolderHeld as error:
        return _meet(error)


def is_all_here(
    url: str, data_dir: Path, federation: str | None = None, token: Path | None = None
) -> bool:
    """Whether the record of a folder has all that a URL names; nobody is asked.

    Of a folder's URL that is the two archives, as without its list nobody knows of only one.
    """
    request = Request(data_dir, Options(), federation, token)
    urls = split_urls(url)
    if len(urls) == 1 and _is_folder(request.parse(urls[0])):
        urls = [_name_in(urls[0], name) for name in (TRAIN_TAR, VAL_TAR)]
    return _find_here(urls, request) is not None


def _is_folder(target: Target) -> bool:
    return has_collection_form(target) or not looks_like_object(target)


def _name_in(url: str, name: str) -> str:
    """The URL of an object in a folder."""
    return f"{url.partition('?')[0].rstrip('/')}/{name}"


def _plan_folder(
    url: str, target: Target, request: Request, index: str, is_bounded: bool
) -> StreamPlan | Refusal:
    """The stream of a folder's two archives."""
    _check_network([target])
    names = list_top(target, request)
    if TRAIN_TAR not in names:
        return Refusal(f"there is no {TRAIN_TAR} in {target.identity}")
    urls = [_name_in(url, name) for name in (TRAIN_TAR, VAL_TAR) if name in names]
    _check_all_names([request.parse(one) for one in urls], request)
    here = _find_here(urls, request)
    if here is not None:
        return StreamPlan(request.out, *here)
    try:
        with take_folder(request.out, PLANNING):
            ledger = Ledger(request.out)
            if VALPREP in names:
                _fetch_small(_name_in(url, VALPREP), request, ledger)
            return _plan_objects(urls, request.out, request, ledger, index, is_bounded)
    except FolderHeld as error:
        return _meet(error)


def _meet(held: FolderHeld) -> Refusal:
    """What another process in the folder means: a fetch is waited for, a stream is not."""
    if not held.is_fetch:
        raise held
    return Refusal(f"{held.holder} is fetching into the same folder", is_passing=True)


def _find_here(urls: Sequence[str], request: Request) -> list[PlannedObject] | None:
    """The objects, if the record of the folder has all of them."""
    ledger, found = Ledger(request.out), []
    for url in urls:
        target = request.parse(url)
        record = ledger.find(request.out / target.name, target.identity)
        if record is None:
            return None
        found.append(PlannedObject(url, request.out / target.name, record["size"], is_here=True))
    return found


def _check_network(targets: Sequence[Target]) -> None:
    for place in dict.fromkeys(t.discovery or t.url for t in targets if t.scheme != "file"):
        check_network(place)


def _fetch_small(url: str, request: Request, ledger: Ledger) -> None:
    target = request.parse(url)
    job = FetchJob(target, request.out / target.name, ledger)
    fetch_object(job, request.access, request.options)


def _check_all_names(targets: Sequence[Target], request: Request) -> None:
    check_distinct((target.name, target.identity, target.url) for target in targets)
    check_names([request.out / target.name for target in targets], request.out)


def _plan_objects(
    urls: Sequence[str],
    data: Path,
    request: Request,
    ledger: Ledger,
    given: str,
    is_bounded: bool,
    index_alone: bool = False,
) -> StreamPlan | Refusal:
    targets = [request.parse(one) for one in urls]
    for target in targets:
        if not target.name.endswith(".tar"):
            return Refusal(f"{target.identity} is no uncompressed tar, which alone can be streamed")
    records = [ledger.find(request.out / target.name, target.identity) for target in targets]
    for target, record in zip(targets, records, strict=True):
        if record is None and os.path.lexists(request.out / target.name):
            return Refusal(f"{request.out / target.name} is there already, and is verified first")
    _check_network([t for t, record in zip(targets, records, strict=True) if record is None])
    sizes = [
        record["size"] if record else _ask_size(target, request)
        for target, record in zip(targets, records, strict=True)
    ]
    planned: list[PlannedObject] = []
    for number, target in enumerate(targets):
        is_here = records[number] is not None
        found = FoundIndex(None)
        if not is_here:
            is_needed = is_bounded and not number
            is_unit = is_needed and not index_alone
            given = "" if number else given
            found = find_index(target, sizes[number], request, ledger, given, is_unit, is_needed)
        if found.path is None and not is_here and not number:
            return Refusal(found.reason, _name_command(urls[0], request))
        proven = found.path is not None and is_proven(found.path, target.name, sizes[number])
        path = request.out / target.name
        planned.append(
            PlannedObject(urls[number], path, sizes[number], is_here, found.path, proven)
        )
    missing = [(one.path, one.size) for one in planned if not one.is_here]
    if is_bounded and not planned[0].is_here:
        missing = missing[1:]  # the trainer knows how much of the tar will be here at a time
        if not index_alone and (left := part_path(planned[0].path)).exists():
            return Refusal(f"{left} is the beginning of a whole copy: finish it, or remove it")
    try:
        check_space_of_all(request.out, missing)
    except NoSpace as error:
        return Refusal(str(error))
    return StreamPlan(data, *planned, is_bounded=is_bounded)


def _name_command(url: str, request: Request) -> str:
    """The command after which this URL can be streamed: its index is looked for in the folder."""
    words = ["python", "scripts/index_tar.py", "--checksums", "--index-dir", str(request.out)]
    for flag, value in (("--federation", request.federation), ("--token", request.token)):
        words += [flag, str(value)] if value else []
    # index_tar.py takes a local tar by its path
    place = decode(url.removeprefix("file://")) if url.startswith("file://") else redact(url)
    return shlex.join([*words, place])


def _ask_size(target: Target, request: Request) -> int:
    with Lookup(target, request.access, request.options) as lookup:
        size = find_size(lookup)
        if any(server.wants_token for server in lookup.servers.all):
            _tell_expiry(lookup.access.tokens.expiry)
    return size


def _tell_expiry(expiry: float | None) -> None:
    if expiry is not None and expiry - time.time() < SOON_S:
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(expiry))
        log.info("the token expires at %s: a longer run needs a new one in its place by then", when)
