"""URLs into a folder: objects with their index, collections recursively, data for a training."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from dataset.byte_meter import ByteMeter
from dataset.errors import UserError
from dataset.federation.collection import Lister, has_collection_form, looks_like_object, path_below
from dataset.federation.lookup import Lookup, Options
from dataset.federation.pelican import Target
from dataset.federation.reach import check_network
from dataset.federation.tokens import Access
from dataset.federation.webdav import Entry
from dataset.fetch.display import Display
from dataset.fetch.index_beside import fetch_index
from dataset.fetch.job import FetchJob
from dataset.fetch.ledger import (
    Ledger,
    NoSpace,
    check_space_of_all,
    lock_folder,
    make_folder,
)
from dataset.fetch.object import fetch_object
from dataset.fetch.request import Request, Summary
from dataset.fetch.size import find_size
from dataset.fetch.small_digests import names_by_path
from dataset.fetch.small_files import SMALL_BYTES, SmallFiles
from dataset.names import INDEX_SUFFIX, KAGGLE_ZIP, SOLUTION, TRAIN_TAR, VAL_TAR, VALPREP
from dataset.own_names import check_distinct, check_names
from dataset.redaction import printable
from dataset.spelling import decode
from dataset.transfer.resume import discard
from dataset.words import count

log = logging.getLogger("trainyard.fetch")

# What a training can use of a data folder, in the order of the design.
DATA_NAMES = (TRAIN_TAR, VAL_TAR, KAGGLE_ZIP, SOLUTION, VALPREP)
KAGGLE_NAMES = DATA_NAMES[2:4]


def fetch_urls(urls: Sequence[str], request: Request) -> list[Summary]:
    """Fetches every URL into the folder; two commands on one folder take turns."""
    targets = [request.parse(url) for url in urls]
    access = request.access
    if request.given and len(targets) != 1:
        raise UserError("a digest is for one object: give one URL with --md5, --sha256, --crc32")
    if request.given and request.recursive:
        raise UserError("a digest is for one object: --recursive takes no --md5, --sha256, --crc32")
    check_distinct((target.name, target.identity, target.url) for target in targets)
    check_names([request.out / t.name for t in targets], request.out, request.own_files)
    summaries: list[Summary] = []
    display = Display(sys.stderr)
    with lock_folder(request.out, request.options.give_up_s):
        ledger = Ledger(request.out)
        try:
            _check_networks([t for t in targets if not _is_here(t, request, ledger)])
            for target in targets:
                is_here = _is_here(target, request, ledger)
                if not is_here and is_collection(target, access, request):
                    summaries += fetch_collection(target, access, request, ledger, display)
                else:
                    summaries.append(_fetch_one(target, access, request, ledger, display))
        except Exception as error:
            error.summaries = [*summaries, *_summary_of(error)]  # type: ignore[attr-defined]
            raise
        finally:
            display.close()
    return summaries


def _summary_of(error: Exception) -> list[Summary]:
    summary = getattr(error, "summary", None)
    return [summary] if summary is not None else []


def _check_networks(targets: Sequence[Target]) -> None:
    for place in dict.fromkeys(t.discovery or t.url for t in targets if t.scheme != "file"):
        check_network(place)


def _is_here(target: Target, request: Request, ledger: Ledger) -> bool:
    """Whether the object was fetched before and verified with the digests given now.

    Then no server is asked: a compute node may have no network.
    """
    if request.recursive or has_collection_form(target):
        return False
    record = ledger.find(request.out / target.name, target.identity)
    known = record.get("digests", {}) if record else {}
    return record is not None and all(known.get(k) == v for k, v in request.given.items())


def is_collection(target: Target, access: Access, request: Request) -> bool:
    """Whether the target is a folder of the federation; asks if its name does not say."""
    if target.scheme == "file":
        return False
    if request.recursive or has_collection_form(target):
        return True
    if looks_like_object(target) or target.scheme != "pelican":
        return False
    with Lookup(target, access, request.options) as lookup:
        return Lister(lookup, target).is_collection()


def _fetch_one(
    target: Target, access: Access, request: Request, ledger: Ledger, display: Display
) -> Summary:
    path = request.out / target.name
    index = request.index or path.with_name(path.name + INDEX_SUFFIX)
    is_free = request.index is None and not os.path.lexists(index)
    wants_index = is_free and target.name.endswith(".tar")
    if wants_index and not _is_here(target, request, ledger):
        fetch_index(target, index, access, request.options, ledger)
    job = FetchJob(target, path, ledger, request.given, index)
    return fetch_object(job, access, request.options, display.show)


def fetch_collection(
    target: Target,
    access: Access,
    request: Request,
    ledger: Ledger,
    display: Display,
    is_second: bool = False,
) -> list[Summary]:
    """Every file below a collection, into OUT/<its name>/..., small ones many at a time."""
    root = request.out / target.name
    files = list_files(target, access, request.options, root)
    check_names((path for _, path in files), request.out, request.own_files)
    todo = [(e, p) for e, p in files if ledger.find(p, target.child(e.path).identity) is None]
    num_files, num_here = count(len(files), "file"), len(files) - len(todo)
    log.info("%s: %s, %d already here", target.identity, num_files, num_here)
    for entry, path in files:
        if (entry.size or 0) > SMALL_BYTES and path.exists() and ledger.vouches_for(path):
            discard(path)  # what a kill between the last two steps of a fetch left
    missing = [(entry, path) for entry, path in todo if not os.path.lexists(path)]
    if missing:
        disk = root if root.is_dir() else request.out
        try:
            check_space_of_all(disk, [(path, entry.size or 0) for entry, path in missing])
        except NoSpace:
            if is_second:
                raise  # a broken answer may claim any size: ask once more
            return fetch_collection(target, access, request, ledger, display, is_second=True)
    for folder in sorted({path.parent for _, path in todo}):
        make_folder(folder)
    summary = Summary(target.identity, str(root), sum(entry.size or 0 for entry, _ in files))
    small = [(e, p) for e, p in missing if e.size is not None and e.size <= SMALL_BYTES]
    chosen = {id(entry) for entry, _ in small}
    large = [(entry, path) for entry, path in todo if id(entry) not in chosen]
    if small:
        large += _fetch_small(target, access, request.options, small, ledger, summary)
    summary.status = "done"
    summaries = [summary]
    for entry, path in sorted(large, key=lambda file: not file[1].name.endswith(INDEX_SUFFIX)):
        index = path.with_name(path.name + INDEX_SUFFIX)  # fetched before its tar
        job = FetchJob(target.child(entry.path), path, ledger, index=index)
        summaries.append(fetch_object(job, access, request.options, display.show))
    return summaries


def list_files(
    target: Target, access: Access, options: Options, root: Path
) -> list[tuple[Entry, Path]]:
    """(entry, local path) of every file below a collection; none at all is an error."""
    with Lookup(target, access, options) as lookup:
        entries = list(Lister(lookup, target).walk())
    if not entries:
        raise UserError(f"{target.identity} holds no files; check that it is the right folder")
    return [(entry, root / path_below(entry, target)) for entry in entries]


def _fetch_small(
    target: Target,
    access: Access,
    options: Options,
    files: list[tuple[Entry, Path]],
    ledger: Ledger,
    summary: Summary,
) -> list[tuple[Entry, Path]]:
    """Fetches small files with a progress bar; returns those that need a full transfer."""
    with Lookup(target.child(files[0][0].path), access, options) as first:
        find_size(first)
        if not all(names_by_path(s.url, files[0][0].path) for s in first.servers.all):
            return files  # the director is asked for each of them
        with ByteMeter(f"{printable(target.name)}, small files", sys.stderr) as meter:
            meter.start(sum(entry.size or 0 for entry, _ in files))
            fetcher = SmallFiles(first, files[0][0].path, files, ledger, meter.update)
            fetcher.run()
    summary.fetched_bytes, summary.hedges = fetcher.num_bytes, fetcher.num_hedges
    summary.sources = [server.describe() for server in first.servers.all]
    _tell_verified(summary, fetcher.num_verified, len(files) - len(fetcher.failed))
    return fetcher.failed


def _tell_verified(summary: Summary, num_verified: int, num_files: int) -> None:
    files = count(num_files, "small file")
    summary.say(f"{files}, {num_verified} of them verified by the origin's digest")
    if num_verified == num_files:
        summary.verified.append("digest of the origin")


def fetch_dataset(
    url: str,
    data_dir: Path,
    *,
    federation: str | None = None,
    token: Path | None = None,
    options: Options | None = None,
) -> Path:
    """The local path of a training's DATA, fetched from its URL into data_dir first.

    For one process of each node, rank 0; the others wait. Processes of several nodes on a shared
    folder take turns by its lock, and the later ones find the files there. A URL of an archive
    gives data_dir/NAME; that of a folder gives data_dir with the archives, or data_dir/NAME with
    its train/ and val/.
    """
    request = Request(data_dir, options or Options(), federation, token)
    target = request.parse(url)
    if looks_like_object(target) and not has_collection_form(target):
        fetch_urls([url], request)
        return data_dir / target.name
    _check_networks([target])
    names = list_top(target, request)
    wanted = _choose_archives(names)
    if wanted and not {"train", "val"} <= names:
        base = url.partition("?")[0].rstrip("/")
        fetch_urls([f"{base}/{name}" for name in wanted], request)
        return data_dir
    if not {"train", "val"} <= names:
        raise UserError(
            f"{target.identity} has neither train/ and val/ nor {', '.join(DATA_NAMES[:3])}: "
            f"{', '.join(sorted(names)[:5]) or 'nothing'}"
        )
    fetch_urls([url], replace(request, recursive=True))
    return data_dir / target.name


def _choose_archives(names: set[str]) -> list[str]:
    """The archives of a folder that a training needs: the tars, or the Kaggle zip without them."""
    has_tars = set(DATA_NAMES[:2]) <= names
    return [n for n in DATA_NAMES if n in names and not (has_tars and n in KAGGLE_NAMES)]


def list_top(target: Target, request: Request) -> set[str]:
    """The names in a folder, local or remote."""
    if target.scheme == "file":
        return {path.name for path in Path(decode(target.path)).iterdir()}
    with Lookup(target, request.access, request.options) as lookup:
        entries = Lister(lookup, target).list_top()
    return {decode(urlsplit(entry.path).path.rpartition("/")[2]) for entry in entries}
