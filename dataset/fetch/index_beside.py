"""The index that may lie beside a tar on its server, fetched before it."""

from __future__ import annotations

import logging
import zipfile
from dataclasses import replace
from pathlib import Path

from dataset.errors import CommandError
from dataset.federation.connection import NETWORK_ERRORS
from dataset.federation.lookup import Lookup, Options
from dataset.federation.pelican import Target, Verdict
from dataset.federation.tokens import Access
from dataset.fetch.job import FetchJob
from dataset.fetch.ledger import Ledger
from dataset.fetch.object import fetch_object
from dataset.fetch.size import ask_size
from dataset.names import INDEX_SUFFIX
from dataset.spelling import decode

log = logging.getLogger("trainyard.fetch")

MAX_INDEX_BYTES = 1 << 30  # that of ImageNet has 60 MB


def fetch_index(
    target: Target, path: Path, access: Access, options: Options, ledger: Ledger
) -> None:
    """Fetches the index beside a tar, if any: it has block checksums, and saves indexing later."""
    beside = target.child(target.path + INDEX_SUFFIX)
    if beside.scheme == "file":
        if not Path(decode(beside.path)).is_file():
            return
    elif not _exists(beside, access, options):
        return
    try:
        fetch_object(FetchJob(beside, path, ledger), access, replace(options, give_up_s=60.0))
    except CommandError as error:
        log.info("the index is not used: %s", error)
        return
    if not zipfile.is_zipfile(path):  # perhaps a page that says "not found"
        log.info("the server's %s is not an index; removed", path.name)
        path.unlink()


def _exists(target: Target, access: Access, options: Options) -> bool:
    """One quick try; False on any failure, since the object is optional."""
    quick = replace(options, stall_s=min(options.stall_s, 5.0))
    with Lookup(target, access, quick, is_optional=True) as lookup:
        lookup.refresh()
        if lookup.answer.verdict is not Verdict.FOUND:
            return False
        try:
            sizes = [ask_size(lookup, server) for server in lookup.servers.all[:1]]
        except NETWORK_ERRORS:
            return False
        return any(0 < size <= MAX_INDEX_BYTES for size in sizes)
