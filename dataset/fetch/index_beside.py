"""The index that may lie beside a tar on its server, fetched before it."""

from __future__ import annotations

import logging
import time
import zipfile
from dataclasses import replace
from pathlib import Path

from dataset.errors import CommandError, PassingError
from dataset.federation.connection import NETWORK_ERRORS
from dataset.federation.framing import NotTheObject
from dataset.federation.lookup import Lookup, Options
from dataset.federation.pelican import Target, Verdict
from dataset.federation.tokens import Access
from dataset.fetch.job import FetchJob
from dataset.fetch.ledger import Ledger
from dataset.fetch.object import fetch_object
from dataset.fetch.size import ask_size
from dataset.names import INDEX_SUFFIX
from dataset.spelling import decode
from dataset.transfer.receive import StatusError

log = logging.getLogger("trainyard.fetch")

MAX_INDEX_BYTES = 1 << 30  # that of ImageNet has 60 MB
AGAIN_S = 0.5  # between two questions to a director that fails


def fetch_index(
    target: Target,
    path: Path,
    access: Access,
    options: Options,
    ledger: Ledger,
    num_tries: int = 1,
    is_needed: bool = False,
) -> None:
    """Fetches the index beside a tar, if any: it has block checksums, and saves indexing later.

    num_tries: how often it is asked for before a silent or failing server means that there is none.
    is_needed: then that is a passing failure (PassingError), as nothing can be done without it.
    """
    beside = target.child(target.path + INDEX_SUFFIX)
    if beside.scheme == "file":
        if not Path(decode(beside.path)).is_file():
            return
    elif not ask_index_size(beside, access, options, num_tries, is_needed):
        return
    try:
        fetch_object(FetchJob(beside, path, ledger), access, replace(options, give_up_s=60.0))
    except CommandError as error:
        if is_needed and isinstance(error, PassingError):
            raise
        log.info("the index is not used: %s", error)
        return
    if not zipfile.is_zipfile(path):  # perhaps a page that says "not found"
        log.info("the server's %s is not an index; removed", path.name)
        path.unlink()


def ask_index_size(
    target: Target, access: Access, options: Options, num_tries: int, is_needed: bool
) -> int:
    """The size of an index, 0 without one; quick tries, each at the next server.

    When all failed it is 0, too, unless the index is needed.
    """
    quick, has_answer = replace(options, stall_s=min(options.stall_s, 5.0)), False
    with Lookup(target, access, quick, is_optional=True) as lookup:
        for number in range(num_tries):
            if number and lookup.answer.verdict is Verdict.PASSING:
                time.sleep(AGAIN_S)
            lookup.refresh()
            servers = lookup.servers.all
            if lookup.answer.verdict in (Verdict.MISSING, Verdict.DENIED):
                return 0
            if lookup.answer.verdict is Verdict.PASSING or not servers:
                continue
            try:
                size = ask_size(lookup, servers[number % len(servers)])
            except NETWORK_ERRORS as error:
                has_answer |= _is_no(error)
                continue
            return size if size <= MAX_INDEX_BYTES else 0
    if is_needed and not has_answer:
        raise PassingError(f"nobody answers whether there is {target.identity}; try again later")
    return 0


def _is_no(error: Exception) -> bool:
    """Whether a server has said no, in its own way: a status, or a page for people.

    Silence, a connection that ends early and a broken answer say nothing.
    """
    if isinstance(error, StatusError):
        return 400 <= error.status < 500 and error.status not in (408, 429)
    return isinstance(error, NotTheObject)
