"""What the nodes of a stream agree on: who streams what, and its end, when all is proven.

Of several nodes, each with a folder of its own, every one streams only what its own ranks use. A
folder that several nodes see is not streamed to: the whole fetch brings each byte there once.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dataset.errors import DataError, UserError
from dataset.stream.arrivals import State
from dataset.stream.node import NodeStream
from dataset.stream.plan import Refusal, StreamPlan, is_all_here
from dataset.words import count
from train.config import TrainConfig
from train.data.network_meter import NetworkMeter
from train.data.sample_order import SampleOrder
from train.data.stream_source import StreamSource
from train.data.unit_source import UnitSource
from train.ranks.comm import Comm
from train.ranks.interrupt import Vote
from train.ranks.nodes import Nodes
from train.stream.task import fetch_folder

log = logging.getLogger("trainyard")

PREFIX = ".trainyard-node-"  # of a file by which nodes find out that they see the same folder
PROVEN, UNPROVEN = "proven", "unproven"  # an index
NEW_S = 3600.0  # such a file is in use for seconds; clocks of nodes and disks may differ by minutes
POLL_S = 0.05
MAX_VERIFY_S = 600.0  # the MD5 of ImageNet's tar takes minutes

Ask = Callable[[], Vote]  # whether the run is to stop


def have_all(cfg: TrainConfig, nodes: Nodes, comm: Comm) -> bool:
    """Whether every node has all of DATA, by the record of its folder; all ranks together."""
    has_all = not nodes.is_leader or is_all_here(
        cfg.data, fetch_folder(cfg), cfg.federation, cfg.token
    )
    return all(comm.gather(has_all))


def detect_shared_folder(folder: Path, nodes: Nodes, comm: Comm) -> bool:
    """Whether some node sees the folder of another; all ranks together.

    Makes the folder, and until all have looked, a small file in it for each node.
    """
    token = None
    try:
        if nodes.is_leader:
            folder.mkdir(parents=True, exist_ok=True)
            _sweep(folder)
            with suppress(OSError):  # read-only or full; but everything may be here already
                fd, name = tempfile.mkstemp(prefix=PREFIX, dir=folder)
                os.close(fd)
                token = Path(name).name
        others = [name for name in comm.gather(token) if name is not None and name != token]
        sees = nodes.is_leader and any((folder / name).exists() for name in others)
        return any(comm.gather(sees))
    finally:
        if token is not None:
            (folder / token).unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    """Removes the files of runs that were killed; a younger one may be of a run that starts now."""
    for left in folder.glob(f"{PREFIX}*"):
        with suppress(OSError):  # somebody else's, or another node was first
            found = left.lstat()
            if found.st_uid == os.geteuid() and time.time() - found.st_mtime > NEW_S:
                left.unlink()


def agree_on_plan(
    found: Sequence[StreamPlan | Refusal | None], nodes: Nodes
) -> StreamPlan | Refusal | None:
    """What this node streams; found: by each rank, of which the leaders have planned."""
    plans = [found[rank] for rank in nodes.leaders]
    for plan in plans:
        if isinstance(plan, Refusal) or plan is None:
            return plan
    here = [isinstance(plan, StreamPlan) and plan.train.is_here for plan in plans]
    if any(here) and not all(here):
        return Refusal(
            f"{sum(here)} of {len(nodes)} nodes have all of it already: remove it there, or let "
            "all fetch it (--stream never)"
        )
    return plans[nodes.own]


def check_same_index(source: StreamSource, comm: Comm) -> None:
    """Raises if the nodes have different indexes: they would train on different images."""
    digest = hashlib.sha256(source.index.offset.tobytes() + source.index.size.tobytes())
    if len(set(comm.gather(digest.hexdigest()))) > 1:
        raise UserError(
            f"the nodes have different indexes of {source.index.tar.name}; remove those in "
            "--data-dir, or name one with --index"
        )


def find_slots(nodes: Nodes, batch_size: int, world_size: int) -> npt.NDArray[np.bool_] | None:
    """Which slots of a batch the ranks of this node have; None: all."""
    if len(nodes) == 1:
        return None
    rank = np.arange(batch_size) * world_size // batch_size
    return np.isin(rank, nodes.own_ranks)


def share_proofs(source: StreamSource, nodes: Nodes, comm: Comm) -> None:
    """Deals out the classes that no node has proven yet; all ranks together."""
    assert isinstance(source, UnitSource)
    unproven = [set(classes) for classes in comm.gather(source.list_unproven())]
    left = sorted(set.intersection(*unproven))
    source.prove_only(left[nodes.own :: len(nodes)])


def describe_shares(used: Sequence[int], size: int, order: SampleOrder) -> str:
    """What each node takes of a tar; used: the bytes of each node."""
    shares = sorted(100 * num_bytes / size for num_bytes in used)
    text = (
        f"{len(used)} nodes with folders of their own: each takes {shares[0]:.1f} to "
        f"{shares[-1]:.1f} % of the tar, all together {sum(shares) / 100:.2f} times the tar"
    )
    if order.lanes == len(used):
        return text
    if order.layout is None:
        return f"{text} (its order is uniform)"
    return f"{text} (its order has {count(order.lanes, 'lane')})"


def count_costs(
    node: NodeStream, sources: Sequence[StreamSource], meters: Sequence[NetworkMeter]
) -> dict[str, Any]:
    """What a stream has cost one node so far."""
    tallies = [source.arrivals.tally for source in sources]
    causes = {cause for tally in tallies for cause in tally.twice or {}}
    return {
        "bytes_fetched": sum(tally.fetched for tally in tallies),
        "bytes_resumed": sum(tally.resumed for tally in tallies),
        "bytes_twice": {
            cause: sum((tally.twice or {}).get(cause, 0) for tally in tallies)
            for cause in sorted(causes)
        },
        "hits": sum(meter.hits for meter in meters),
        "misses": sum(meter.misses for meter in meters),
        "network_wait_s": sum(meter.waited_s for meter in meters) / len(meters),
        "fetcher_restarts": node.num_restarts,
        "index": PROVEN if node.plan.train.is_proven else UNPROVEN,
        "is_whole": all(source.arrivals.state is State.WHOLE for source in sources),
    }


def add_costs(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The costs of all nodes: sums, the mean of waits, and each node's own bytes."""
    total: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]  # only a full disk has a limit
        if isinstance(values[0], bool):
            total[name] = all(values)
        elif isinstance(values[0], Mapping):
            causes = sorted({cause for row in values for cause in row})
            total[name] = {cause: sum(row.get(cause, 0) for row in values) for cause in causes}
        elif name == "network_wait_s":
            total[name] = sum(values) / len(values)
        elif name == "index":
            total[name] = PROVEN if set(values) == {PROVEN} else UNPROVEN
        else:
            total[name] = sum(values)
    return total | {"bytes_of_nodes": [row["bytes_fetched"] for row in rows]}


def prove_classes(sources: Sequence[StreamSource], ask: Ask) -> Vote:
    """Waits until the class tars of all classes have come; raises if the index has one wrong."""
    has_told = False
    for source in sources:
        while late := source.list_unproven():
            if not has_told:
                classes = count(len(late), "class", "classes")
                log.info("trained; waits for what proves the labels of %s", classes)
                has_told = True
            source.ask_for_proofs()
            failure = source.arrivals.failure
            if failure is not None:
                raise failure
            if (vote := ask()).is_urgent:
                return vote
            time.sleep(POLL_S)
    return Vote.GO_ON


def await_verification(sources: Sequence[StreamSource], ask: Ask) -> Vote:
    """Waits while a tar that has all arrived is verified; one that has not is left as it is."""
    deadline_s, has_told = time.monotonic() + MAX_VERIFY_S, False
    for arrivals in (source.arrivals for source in sources if source.keeps_all):
        while arrivals.state is State.COMING and arrivals.here.all():
            if not has_told:
                log.info("all has arrived; waits until it is verified and has its name")
                has_told = True
            if (vote := ask()).is_urgent:
                return vote
            if time.monotonic() > deadline_s:
                log.info("not verified after %.0f s; the next start goes on", MAX_VERIFY_S)
                return Vote.GO_ON
            time.sleep(POLL_S)
        if isinstance(arrivals.failure, DataError):
            raise arrivals.failure
    return Vote.GO_ON
