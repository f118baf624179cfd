"""The data of a grid study: is it there, does it fit, is its index the right one?"""

from __future__ import annotations

import logging
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from dataset.errors import CommandError, PassingError, UserError
from dataset.federation.lookup import Lookup, Options
from dataset.federation.pelican import Target
from dataset.federation.reach import check_network
from dataset.fetch.job import FetchJob
from dataset.fetch.ledger import Ledger
from dataset.fetch.object import fetch_object
from dataset.fetch.request import Request
from dataset.fetch.size import find_size
from dataset.fetch.urls import is_collection
from dataset.names import INDEX_SUFFIX, is_of_val
from dataset.transfer.chunk_sums import NoChecks, OtherTar, read_block_checks

log = logging.getLogger("trainyard")
GIB = 1 << 30  # as HTCondor counts
INDEXED = "index with block checksums"
OF_INDEX = Options(give_up_s=30.0, missing_s=5.0)


def check_data(data: str, macros: Mapping[str, str]) -> list[str]:
    """The URLs of tars without an index of their blocks beside them; logs what the jobs will find.

    Raises if the data is missing or too large, or an index is of another tar.
    """
    if "://" not in data:
        log.info("%s: nothing to fetch, nothing to check", data)
        return []
    # Give up soon: after exit 75 DAGMan runs the check again in a few minutes.
    request = Request(Path(), Options(give_up_s=60.0), macros.get("FEDERATION") or None)
    total, unindexed = 0, []
    is_bounded = macros.get("CACHE_GB", "0") != "0"  # then the job holds a part at a time
    for url in data.split(","):
        target = request.parse(url)
        if target.scheme != "file":
            check_network(target.discovery or target.url)
        if is_collection(target, request.access, request):
            log.info("%s: a collection; its size is known only when it is fetched", target.identity)
            continue
        size = ask_for_size(target, request)
        total += size
        has_units = is_bounded and not is_of_val(target.name)  # that one is fetched whole
        words = describe_index(target, size, request, has_units=has_units)
        log.info("%s: %d bytes, %s", target.identity, size, words)
        unindexed += [url] if words != INDEXED else []
    data_gb = float(macros.get("DATA_GB", "138"))
    if total > data_gb * GIB and not is_bounded:
        raise UserError(
            f"the data has {total / GIB:.3g} GB, but DATA_GB={data_gb:g}: jobs would run out of "
            "disk; give a larger DATA_GB"
        )
    return unindexed


def ask_for_size(target: Target, request: Request) -> int:
    """The size of an object, as its sources report it."""
    with Lookup(target, request.access, request.options) as lookup:
        return find_size(lookup)


def describe_index(target: Target, size: int, request: Request, *, has_units: bool) -> str:
    """Which checks the index beside a tar allows; raises when it belongs to another tar.

    has_units: the jobs need a checksum for each unit, too.
    """
    if not target.name.endswith(".tar"):
        return "no tar"
    beside = target.child(target.path + INDEX_SUFFIX)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, target.name + INDEX_SUFFIX)
        try:
            fetch_object(FetchJob(beside, path, Ledger(Path(folder))), request.access, OF_INDEX)
        except PassingError:  # nobody said that there is none
            raise
        except (CommandError, FileNotFoundError):
            return "no index beside it"
        try:
            read_block_checks(path, size)
        except OtherTar as error:
            fix = "make the index again: python scripts/index_tar.py --checksums"
            raise UserError(f"{error}; {fix}") from None
        except NoChecks as error:
            return f"index without block checksums ({error})"
        if has_units and "unit_crc32.npy" not in zipfile.ZipFile(path).namelist():
            return "index without checksums of units, which CACHE_GB needs"
    return INDEXED
