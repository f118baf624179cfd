"""Opens the data of a run: a URL is fetched and a folder is listed by one rank per node for all.

Listing 1.28 million files takes a shared disk minutes, and again for each rank that does it. The
other ranks of the node read the list from shared memory.
"""

from __future__ import annotations

import logging
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from dataset.errors import UserError
from dataset.federation.lookup import Options
from dataset.fetch.ledger import FolderHeld
from dataset.fetch.urls import fetch_dataset
from dataset.names import split_urls
from dataset.redaction import printable, redact
from dataset.stream.meeting import meet
from dataset.stream.plan import Refusal, StreamPlan
from train.config import TrainConfig
from train.data.sources import AbsentTar, Source
from train.data.splits import (
    Dataset,
    join_splits,
    needs_index,
    open_dataset,
    open_split,
    open_tar,
)
from train.ranks.comm import Comm
from train.ranks.cpus import own_binding
from train.ranks.launch import Launch
from train.ranks.nodes import Nodes, find_nodes
from train.records.stage_meter import measure_stage
from train.stream.loop_stream import LoopStream, StreamRequest, open_loop_stream
from train.stream.run_stream import Stream
from train.stream.task import ask_for_plan

log = logging.getLogger("trainyard")
DATA_DIR = Path("data")  # where URLs are fetched to
POLL_S = 1.0  # between two looks at a folder that another process has
SHARED_MEMORY = Path("/dev/shm")


def open_together(cfg: TrainConfig, launch: Launch, comm: Comm, stream: Stream) -> Dataset:
    """The data set, opened by one rank per node; if an index must be made, rank 0 goes first."""
    num_nodes = sum(comm.gather(launch.local_rank == 0))  # not every launcher says it
    nodes = find_nodes(launch, comm)
    if stream.plan(nodes):
        return open_stream(cfg, launch, comm, stream, nodes)
    if (plan := plan_evaluation(cfg, launch, comm, num_nodes)) is not None:
        return open_evaluation(cfg, launch, comm, plan, num_nodes)
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
    check_same_data(dataset, cfg.data, comm)
    return dataset


def open_stream(
    cfg: TrainConfig, launch: Launch, comm: Comm, stream: Stream, nodes: Nodes
) -> Dataset:
    """The data set of a stream; validation without an index is fetched whole first."""
    whole_val = max(comm.gather(stream.whole_val))  # a node may have it already
    if whole_val:
        fetch_once_a_node(cfg, [whole_val], launch, comm, len(nodes))
    dataset = open_once_a_node(stream.open_dataset, nodes.is_leader, comm, f"node {nodes.own}")
    stream.join(dataset)
    check_same_data(dataset, cfg.data, comm)  # one folder may have a validation tar of its own
    return dataset


def plan_evaluation(
    cfg: TrainConfig, launch: Launch, comm: Comm, num_nodes: int
) -> StreamPlan | None:
    """How -e does without the training tar, of which it needs the classes; None: it cannot.

    They are those of the tar's index. The validation tar cannot replace it: it may lack a class.
    """
    if not cfg.evaluate or len(cfg.urls) != 2 or cfg.stream == "never" or cfg.val_share:
        return None
    found = None
    if launch.local_rank == 0:
        found = ask_for_index(cfg)
        comm.say_done("plan")
    comm.wait_until_done("plan", num_nodes)  # for as long as it takes
    found_by_nodes = [one for one in comm.gather(found) if one is not None]
    for one in found_by_nodes:
        if isinstance(one, Refusal):
            log.info("-e fetches the training tar, too: %s", one)
            return None
    is_here = any(plan.train.is_here for plan in found_by_nodes)
    return None if is_here else found_by_nodes[0]


def ask_for_index(cfg: TrainConfig) -> StreamPlan | Refusal:
    """Where the index of the training tar is; without one, why not.

    It is planned as for a cache: no room is asked for, for a tar that will not come. A fetch into
    the same folder is waited for, as it may be that of the same validation tar.
    """
    deadline_s, has_told = time.monotonic() + cfg.give_up_s, False
    while True:
        try:
            found = ask_for_plan(cfg, is_bounded=True, index_alone=True)
        except FolderHeld as error:
            return Refusal(f"{error.holder} has the folder")
        except UserError as error:
            if cfg.index:  # it is of no use: a whole fetch would hide the mistake
                raise
            return Refusal(str(error))
        is_held = isinstance(found, Refusal) and found.is_passing
        if not is_held or time.monotonic() > deadline_s:
            return found
        if not has_told:
            log.info("waits: %s", found)
            has_told = True
        time.sleep(POLL_S)


def open_evaluation(
    cfg: TrainConfig, launch: Launch, comm: Comm, plan: StreamPlan, num_nodes: int
) -> Dataset:
    """The validation tar, fetched, and the training tar as its index knows it."""
    val, _ = fetch_once_a_node(cfg, cfg.urls[1:], launch, comm, num_nodes)

    def open_own() -> Dataset:
        train = AbsentTar(plan.train.load_index())
        return join_splits("tar", plan.train.path, train, open_tar(val, cfg.index_dir))

    dataset = open_once_a_node(open_own, launch.local_rank == 0, comm)
    check_same_data(dataset, cfg.data, comm)
    return dataset


def check_same_data(dataset: Dataset, data: str, comm: Comm) -> None:
    """Raises if not all ranks have the same images; all ranks ask together."""
    if len(set(comm.gather(dataset.fingerprint))) > 1:
        where = printable(redact(data))
        raise UserError(
            f"the ranks see different data at {where}; use identical copies, with the same "
            "validation images or none"
        )


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

    A URL, or two of a train and a val tar with a comma between, is streamed if it can be, else
    fetched whole and verified; an earlier fetch into the same folder is found again. Processes that
    open a URL into one folder take turns.
    """
    urls = split_urls(data)
    if not urls:
        path = Path(data)
        return open_split(path, split, index_dir, allow_empty=allow_empty), path, None
    where = data_dir or DATA_DIR
    joined = ",".join(urls)  # in whatever order they were given
    request = StreamRequest(joined, where, stream, index or "", federation, token, index_dir)
    fetch = partial(fetch_dataset, data_dir=where, federation=federation, token=token)
    if stream == "never":
        paths = [fetch(url) for url in urls]
    else:
        with meet(where) as meeting:
            found = open_loop_stream(request, meeting, fetch)
            if found is not None:
                return found.use(split), found.path, found
            paths = [fetch(url) for url in urls]
    if len(paths) == 1:
        return open_split(paths[0], split, index_dir, allow_empty=allow_empty), paths[0], None
    both = open_dataset(paths[0], index_dir, val=paths[1])
    source = both.train if split == "train" else both.val
    assert source is not None  # of the second tar
    return source, where, None


def open_once_a_node(
    open_own: Callable[[], Dataset], is_first: bool, comm: Comm, node: str = ""
) -> Dataset:
    """The data set, as the first rank of this node found it; node: by default the machine."""
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
        node = node or own_binding().machine
        offers = [place for where, place in comm.gather((node, path)) if where == node]
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
