"""The index that may lie beside a tar at its source, fetched before it."""

from __future__ import annotations

import logging
import zipfile
from dataclasses import replace
from pathlib import Path

from dataset.federation.connection import NETWORK_ERRORS, Pool
from dataset.errors import CommandError
from dataset.federation.pelican import Target, Verdict
from dataset.fetch.object import Job, fetch_object
from dataset.fetch.folder import Ledger
from dataset.federation.lookup import Access, Lookup, Options
from dataset.fetch.probe import ask_size
from dataset.spelling import decode

log = logging.getLogger("trainyard.fetch")

INDEX_SUFFIX = ".index"
MAX_INDEX_BYTES = 1 << 30  # that of ImageNet has 60 MB


def fetch_index(
    target: Target, path: Path, access: Access, options: Options, ledger: Ledger
) -> None:
    """The index beside a tar, if there is one: block checksums, and no indexing after the fetch."""
    beside = target.child(target.path + INDEX_SUFFIX)
    if beside.scheme == "file":
        if not Path(decode(beside.path)).is_file():
            return
    elif not _exists(beside, access, options):
        return
    try:
        fetch_object(Job(beside, path, ledger), access, replace(options, give_up_s=60.0))
    except CommandError as error:
        log.info("the index is not used: %s", error)
        return
    if not zipfile.is_zipfile(path):  # a page that says "not found"; a training would believe it
        log.info("what the server has as %s is no index; removed", path.name)
        path.unlink()


def _exists(target: Target, access: Access, options: Options) -> bool:
    """One quick look; False on any trouble, since the object is optional."""
    pool = Pool(min(options.stall_s, 5.0))
    lookup = Lookup(target, access, options, pool, is_optional=True)
    try:
        lookup.refresh()
        if lookup.answer.verdict is not Verdict.FOUND:
            return False
        sizes = [ask_size(lookup, source) for source in lookup.sources.all[:1]]
        return any(0 < size <= MAX_INDEX_BYTES for size in sizes)
    except NETWORK_ERRORS:
        return False
    finally:
        lookup.close()
        pool.close()
