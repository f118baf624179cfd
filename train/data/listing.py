"""The data set, opened by one rank per node; the others read its list from shared memory.

Listing 1.28 million files takes a shared disk minutes, and again for each rank that does it.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path

from train.data.sources import Dataset
from train.ranks.comm import Comm
from train.ranks.cpus import own_binding

SHARED_MEMORY = Path("/dev/shm")


def open_once_a_node(open_own: Callable[[], Dataset], is_first: bool, comm: Comm) -> Dataset:
    """The data set, as the first rank of this node found it."""
    if comm.world_size == 1:
        return open_own()
    own, path = None, None
    num_first = sum(comm.gather(is_first))
    if is_first:
        own = open_own()
        path = _put_down(own)
        comm.say_done("listing")
    try:
        comm.wait_until_done("listing", num_first)  # for as long as it takes
        machine = own_binding().machine
        offers = [place for where, place in comm.gather((machine, path)) if where == machine]
        dataset = own or _take_up(offers) or open_own()
        comm.gather(None)  # all have taken it
    finally:
        if path is not None:
            path.unlink(missing_ok=True)
    return dataset


def _put_down(dataset: Dataset) -> Path | None:
    """Where the other ranks of the node find it; None if there is no room for it."""
    folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    try:
        fd, name = tempfile.mkstemp(prefix="trainyard-listing-", dir=folder)
    except OSError:
        return None
    path = Path(name)
    try:
        with os.fdopen(fd, "wb") as file:
            pickle.dump(dataset, file)
        return path
    except OSError:
        path.unlink(missing_ok=True)
        return None


def _take_up(offers: list[Path | None]) -> Dataset | None:
    """The first that can be read; None if this rank's container has shared memory of its own."""
    for path in offers:
        try:
            if path is not None and path.stat().st_uid == os.geteuid():
                dataset: Dataset = pickle.loads(path.read_bytes())
                return dataset
        except OSError:
            continue
    return None
