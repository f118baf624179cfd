"""What a stream of a URL takes: its objects, their index, and room on the disk."""

from __future__ import annotations

import logging
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dataset.archive.index import guess_split
from dataset.archive.index_file import TarIndex, load_by_size
from dataset.errors import DataError, UserError
from dataset.federation.collection import has_collection_form, looks_like_object
from dataset.federation.lookup import Lookup, Options
from dataset.federation.pelican import Target
from dataset.federation.reach import check_network
from dataset.fetch.job import FetchJob
from dataset.fetch.ledger import Ledger, NoSpace, check_space_of_all, take_folder
from dataset.fetch.object import fetch_object
from dataset.fetch.request import Request
from dataset.fetch.size import find_size
from dataset.fetch.urls import list_top
from dataset.names import TRAIN_TAR, VAL_TAR, VALPREP
from dataset.own_names import check_distinct, check_names, part_path
from dataset.redaction import printable, redact
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

    @property
    def is_here(self) -> bool:
        """Whether nothing has to come."""
        return self.train.is_here and (self.val is None or self.val.is_here)


@dataclass(frozen=True)
class Refusal:
    """Why there can be no stream, and the command that would change it, if there is one."""

    reason: str
    command: str = ""


def plan_stream(
    url: str,
    data_dir: Path,
    *,
    index: str = "",
    federation: str | None = None,
    token: Path | None = None,
    options: Options | None = None,
    is_bounded: bool = False,
) -> StreamPlan | Refusal:
    """How to stream a URL into a folder; a Refusal says in words why that cannot be.

    The URL is that of a tar, or of a folder with the two of ILSVRC2012; or there are two, those of
    a train and a val tar, with a comma between. `index` is the file or URL of the train tar's.
    The folder is held meanwhile: another job there ends this one at once (exit 2).
    is_bounded: only a part of the train tar will be on the disk at a time.
    """
    request = Request(data_dir, options or Options(), federation, token)
    named = re.split(r",(?=\w+://)", url)
    targets = [request.parse(one) for one in named]
    with take_folder(data_dir, f"a stream of {printable(redact(url))}"):
        ledger = Ledger(data_dir)
        if len(named) == 1 and (
            has_collection_form(targets[0]) or not looks_like_object(targets[0])
        ):
            _check_network(targets)
            names = list_top(targets[0], request)
            if TRAIN_TAR not in names:
                return Refusal(f"there is no {TRAIN_TAR} in {targets[0].identity}")
            base = url.partition("?")[0].rstrip("/")
            named = [f"{base}/{name}" for name in (TRAIN_TAR, VAL_TAR) if name in names]
            if VALPREP in names:
                _fetch_small(f"{base}/{VALPREP}", request, ledger)
            data = data_dir
        else:
            data = data_dir if len(named) > 1 else data_dir / targets[0].name
        urls = _sort_splits(named, request)
        return _plan_objects(urls, data, request, ledger, index, is_bounded)


def _check_network(targets: Sequence[Target]) -> None:
    for place in dict.fromkeys(t.discovery or t.url for t in targets if t.scheme != "file"):
        check_network(place)


def _fetch_small(url: str, request: Request, ledger: Ledger) -> None:
    target = request.parse(url)
    job = FetchJob(target, request.out / target.name, ledger)
    fetch_object(job, request.access, request.options)


def _sort_splits(named: Sequence[str], request: Request) -> list[str]:
    """The URLs of the train tar and of the val tar, if there is one."""
    targets = [request.parse(one) for one in named]
    check_distinct((target.name, target.identity, target.url) for target in targets)
    check_names([request.out / target.name for target in targets], request.out)
    if len(named) == 1:
        return list(named)
    splits = [guess_split(Path(target.name)) for target in targets]
    if sorted(splits) != ["train", "val"]:
        raise UserError(
            f"{', '.join(target.name for target in targets)}: give one URL, or those of a train "
            "and a val tar, the latter with 'val' in its name"
        )
    return sorted(named, key=lambda one: splits[named.index(one)])


def _plan_objects(
    urls: Sequence[str],
    data: Path,
    request: Request,
    ledger: Ledger,
    given: str,
    is_bounded: bool,
) -> StreamPlan | Refusal:
    targets = [request.parse(one) for one in urls]
    for target in targets:
        if not target.name.endswith(".tar"):
            return Refusal(f"{target.identity} is no uncompressed tar, which alone can be streamed")
    records = [ledger.find(request.out / target.name, target.identity) for target in targets]
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
            is_unit = is_bounded and not number
            given = "" if number else given
            found = find_index(target, sizes[number], request, ledger, given, is_unit)
        if found.path is None and not is_here and not number:
            command = f"python scripts/index_tar.py --checksums {shlex.quote(redact(urls[0]))}"
            return Refusal(found.reason, command)
        proven = found.path is not None and is_proven(found.path, target.name, sizes[number])
        path = request.out / target.name
        planned.append(
            PlannedObject(urls[number], path, sizes[number], is_here, found.path, proven)
        )
    missing = [(one.path, one.size) for one in planned if not one.is_here]
    if is_bounded and not planned[0].is_here:
        missing = missing[1:]  # the trainer knows how much of the tar will be here at a time
        if (left := part_path(planned[0].path)).exists():
            return Refusal(f"{left} is the beginning of a whole copy: finish it, or remove it")
    try:
        check_space_of_all(request.out, missing)
    except NoSpace as error:
        return Refusal(str(error))
    return StreamPlan(data, *planned)


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
