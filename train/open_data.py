"""Opens the data of a run: a URL is fetched and a folder is listed by one rank per node for all.

Listing 1.28 million files takes a shared disk minutes, and again for each rank that does it. The
other ranks of the node read the list from shared memory.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from dataset.errors import UserError
from dataset.federation.lookup import Options
from dataset.fetch.urls import fetch_dataset
from dataset.stream.meeting import meet
from train.config import TrainConfig
from train.data.sources import Source
from train.data.splits import Dataset, needs_index, open_dataset, open_split
from train.loop_stream import LoopStream, StreamRequest, open_loop_stream
from train.ranks.comm import Comm
from train.ranks.cpus import own_binding
from train.ranks.launch import Launch
from train.records.stage_meter import measure_stage
from train.streaming import Stream

DATA_DIR = Path("data")  # where URLs are fetched to
SHARED_MEMORY = Path("/dev/shm")


def open_together(cfg: TrainConfig, launch: Launch, comm: Comm, stream: Stream) -> Dataset:
    """The data set, opened by one rank per node; if an index must be made, rank 0 goes first."""
    num_nodes = sum(comm.gather(launch.local_rank == 0))  # not every launcher says it
    if stream.plan(num_nodes):
        return open_stream(cfg, launch, comm, stream)
    path, val = fetch_once_a_node(cfg, cfg.urls, launch, comm, num_nodes)
    is_first = launch.local_rank == 0 or launch.is_main
    in_turns = comm.world_size > 1 and is_first and needs_index(path, cfg.index_dir, val)
    in_turns = any(comm.gather(in_turns))

    def open_own() -> Dataset:
        if in_turns and is_first and not launch.is_main:
            comm.wait_until_done("index", 1)
        dataset = open_dataset(path, cfg.index_dir, allow_empty=cfg.allow_empty_classes, val=val)
        if launch.is_main:
            comm.say_done("index")
        return dataset

    dataset = open_once_a_node(open_own, is_first, comm)
    if len(set(comm.gather(dataset.fingerprint))) > 1:
        raise UserError(f"the ranks see different data at {cfg.data}; use identical copies")
    return dataset


def open_stream(cfg: TrainConfig, launch: Launch, comm: Comm, stream: Stream) -> Dataset:
    """The data set of a stream; validation without an index is fetched whole first."""
    if stream.whole_val:
        fetch_once_a_node(cfg, [stream.whole_val], launch, comm, 1)
    dataset = open_once_a_node(stream.open_dataset, launch.is_main, comm)
    stream.join(dataset)
    return dataset


def fetch_once_a_node(
    cfg: TrainConfig, urls: list[str], launch: Launch, comm: Comm, num_nodes: int
) -> tuple[Path, Path | None]:
    """The local path of DATA, and of the second of two URLs; fetched to --data-dir, resumably."""
    if not urls:
        return Path(cfg.data), None
    paths: list[Path] = []
    if launch.local_rank == 0:
        where = cfg.data_dir or DATA_DIR
        fetch = partial(
            fetch_dataset,
            data_dir=where,
            federation=cfg.federation,
            token=cfg.token,
            options=Options(give_up_s=cfg.give_up_s),
        )
        with measure_stage("fetch", cfg.output if cfg.output and launch.is_main else where):
            paths = [fetch(url) for url in urls]
        comm.say_done("fetch")
    comm.wait_until_done("fetch", num_nodes)
    train, *val = comm.from_main(paths)
    return train, val[0] if val else None


def open_source(
    data: str,
    split: str,
    *,
    index_dir: Path | None,
    data_dir: Path | None,
    federation: str | None,
    token: Path | None,
    allow_empty: bool,
    stream: str,
    index: str | None,
) -> tuple[Source, Path, LoopStream | None]:
    """One split of the data for a loop that is not ours, where it lies on the disk, and its stream.

    A URL is streamed if it can be, else fetched whole and verified; an earlier fetch into the same
    folder is found again. Processes that open a URL into one folder take turns.
    """
    if "://" not in data:
        path = Path(data)
        return open_split(path, split, index_dir, allow_empty=allow_empty), path, None
    where = data_dir or DATA_DIR
    request = StreamRequest(data, where, stream, index or "", federation, token, index_dir)
    fetch = partial(fetch_dataset, data_dir=where, federation=federation, token=token)
    if stream == "never":
        path = fetch(data)
    else:
        with meet(where) as meeting:
            found = open_loop_stream(request, meeting, fetch)
            if found is not None:
                return found.use(split), found.path, found
            path = fetch(data)
    return open_split(path, split, index_dir, allow_empty=allow_empty), path, None


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
