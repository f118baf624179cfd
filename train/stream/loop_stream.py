"""The stream of a URL for a loop that is not ours: opened once a node, fetched as it is read.

The first process of a node that opens a URL keeps its fetcher, which dies with it. Others that open
the same URL into the same folder, such as the other ranks of the node, read what it brings.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dataset.errors import UserError
from dataset.names import VAL_TAR
from dataset.stream.arrivals import MAX_RANKS, State
from dataset.stream.meeting import Meeting, Owner
from dataset.stream.node import NodeStream
from dataset.stream.plan import Refusal, StreamPlan, plan_stream
from dataset.stream.spec import Needs, StreamSpec
from train.data.image_dataset import ImageDataset
from train.data.needs import count_first_steps, find_needs
from train.data.network_meter import NetworkMeter
from train.data.resumable import Arrival
from train.data.sample_order import SampleOrder
from train.data.sources import Source
from train.data.stream_source import StreamSource
from train.ranks.launch import detect_launch
from train.stream.run_stream import open_streamed, refuse_nodes, tell_start

log = logging.getLogger("trainyard")

MODES = ("auto", "never", "always")
GIVE_UP_S = 6 * 3600.0  # without a byte, as --give-up-after


@dataclass(frozen=True)
class StreamRequest:
    """What is to be streamed, and how; as the flags of `python -m train`."""

    url: str
    data_dir: Path
    mode: str = "auto"
    index: str = ""
    federation: str | None = None
    token: Path | None = None
    index_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(f"stream {self.mode!r} is none of {', '.join(map(repr, MODES))}")

    @property
    def key(self) -> tuple[int, str, str]:
        """A stream of this process is found again by it; that of a parent is not."""
        return os.getpid(), str(self.data_dir.resolve()), self.url


class LoopStream:
    """A stream in one process: its images, and the fetcher if this process keeps it."""

    def __init__(self, request: StreamRequest, node: NodeStream, owner: Owner) -> None:
        self._request, self._node, self._owner = request, node, owner
        self._num_users = 0
        self._splits: set[str] = set()  # that are read
        self._needs: Needs | None = None  # None: nobody knows the order of the reads
        self._first_steps = 0
        self._spec: StreamSpec | None = None  # the task of the fetcher
        row, meter = _claim_meter(node.folder)
        self._dataset = open_streamed(node, meter, request.index_dir)
        splits = (self._dataset.train, self._dataset.val)
        self._sources = [source for source in splits if isinstance(source, StreamSource)]
        for source in self._sources:
            source.count_on(meter, row, is_kept=owner.is_alive)
        self.end = weakref.finalize(self, _end, node, owner)  # also at the exit of the process

    @property
    def path(self) -> Path:
        """Where the data lies once all of it is here."""
        return self._node.plan.data

    @property
    def has_failed(self) -> bool:
        return any(source.arrivals.state is State.FAILED for source in self._sources)

    def use(self, split: str) -> Source:
        """The images of a split, for a user who will leave; a tar is a split by itself."""
        is_tar = self.path == self._node.plan.train.path
        source = self._dataset.train if is_tar or split == "train" else self._dataset.val
        if source is None:
            raise UserError(f"{self._request.url} has no validation images: no {VAL_TAR}")
        self._num_users += 1
        self._splits.add("train" if is_tar else split)
        return source

    def leave(self) -> None:
        """A user reads no more; after the last one the fetcher is ended."""
        self._num_users -= 1
        if not self._num_users:
            self.end()

    def serve(self) -> None:
        """Fetches what readers wait for; a fetcher that follows an order goes on with that."""
        self._fetch(is_new=False)

    def follow(self, order: SampleOrder, seed: int, batch_size: int, step: int) -> None:
        """Fetches what a loop over the training images needs from this step on, in its order."""
        if self._owner.is_me:
            train = self._sources[0]
            last_step = step + len(train) // batch_size - 1
            self._needs = find_needs(train, order, seed, batch_size, step, last_step)
            self._first_steps = count_first_steps(order, len(train), batch_size, step)
            tell_start(self._request.url, self._request.data_dir, self._node, order)
            self._fetch(is_new=True)

    def _fetch(self, is_new: bool) -> None:
        if not self._owner.is_me or all(s.arrivals.state is State.WHOLE for s in self._sources):
            return
        request, node = self._request, self._node
        spec = StreamSpec(
            str(request.data_dir),
            node.describe("train", self._needs, is_asked=True),
            node.describe("val", is_asked=True) if "val" in node.objects else None,
            val_first="train" not in self._splits,
            first_steps=self._first_steps,
            federation=request.federation,
            token=str(request.token) if request.token else None,
            give_up_s=GIVE_UP_S,
        )
        if is_new or spec != self._spec:
            node.start(spec, [source.arrivals for source in self._sources])
            self._spec = spec


class StreamArrival(Arrival):
    """The images of a loop, as a stream brings them; nothing to do if there is none."""

    def __init__(
        self, opened: ImageDataset, is_own: bool, is_train: bool, seed: int, batch_size: int
    ) -> None:
        self._opened, self._is_own = opened, is_own
        self._is_train, self._seed, self._batch_size = is_train, seed, batch_size

    def follow(self, order: SampleOrder, step: int) -> None:
        stream: LoopStream | None = self._opened.stream
        if stream is None:
            return
        if self._is_train:
            stream.follow(order, self._seed, self._batch_size, step)
        else:
            stream.serve()

    def look(self) -> None:
        if isinstance(self._opened.source, StreamSource):
            self._opened.source.list_unproven()

    def close(self) -> None:
        if self._is_own:
            self._opened.close()


_opened: weakref.WeakValueDictionary[tuple[int, str, str], LoopStream] = (
    weakref.WeakValueDictionary()
)


def open_loop_stream(
    request: StreamRequest, meeting: Meeting, fetch: Callable[[str], Path]
) -> LoopStream | None:
    """The stream of a URL; None if the data is here, or must be fetched whole, as the log explains.

    fetch: fetches a URL whole, which validation images without an index need.
    """
    stream = _opened.get(request.key)
    if stream is not None and stream.end.alive and not stream.has_failed:
        return stream
    if stream is not None:
        stream.end()
    folder = meeting.find(request.url)
    stream = _join(request, folder) if folder is not None else None
    stream = stream or _begin(request, meeting, fetch)
    if stream is not None:
        _opened[request.key] = stream
    return stream


def _join(request: StreamRequest, folder: Path) -> LoopStream | None:
    """The stream that another process keeps, unless that ends just now."""
    with suppress(FileNotFoundError):
        return LoopStream(request, NodeStream.load(folder), Owner(folder))
    return None


def _begin(
    request: StreamRequest, meeting: Meeting, fetch: Callable[[str], Path]
) -> LoopStream | None:
    plan = _plan(request)
    if isinstance(plan, Refusal):
        if request.mode == "always":
            raise UserError(f"stream='always': it cannot be streamed, {plan}")
        log.info("not streamed but fetched whole first: %s", plan)
        return None
    if plan.train.is_here:
        return None
    node = NodeStream.create(plan)
    owner = Owner.become(node.folder)
    try:
        if node.whole_val:
            fetch(node.whole_val)
        stream = LoopStream(request, node, owner)
    except BaseException:
        _end(node, owner)
        raise
    meeting.tell(request.url, node.folder)
    return stream


def _plan(request: StreamRequest) -> StreamPlan | Refusal:
    num_nodes = 1
    with suppress(UserError):  # a notebook in an allocation: its variables are not for us
        num_nodes = detect_launch(os.environ).num_nodes
    if num_nodes > 1:
        return refuse_nodes(num_nodes)
    return plan_stream(
        request.url,
        request.data_dir,
        index=request.index,
        federation=request.federation,
        token=request.token,
    )


def _claim_meter(folder: Path) -> tuple[int, NetworkMeter]:
    """A row in the maps that no other process counts in, and its meter."""
    for row in range(MAX_RANKS):
        with suppress(FileExistsError):
            os.close(os.open(folder / f"meter-{row}", os.O_CREAT | os.O_EXCL, 0o600))
            return row, NetworkMeter(folder / f"meter-{row}")
    raise UserError(f"{MAX_RANKS} processes read this stream already")


def _end(node: NodeStream, owner: Owner) -> None:
    """Ends the fetcher, and removes the folder; nothing in a process that keeps no fetcher."""
    if owner.is_me:
        node.stop()
        node.remove()
        owner.resign()
