"""The process of a node that fills its partial files by need: python -m dataset.stream.fetcher.

It fetches as scripts/fetch_osdf.py does, into the same files: each goes on where the other stopped.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from dataset.errors import USER_MISTAKE, CommandError, DataError, describe_os_error, run_command
from dataset.federation.lookup import Options
from dataset.fetch.job import FetchJob
from dataset.fetch.ledger import Ledger, take_folder
from dataset.fetch.object import fetch_object
from dataset.fetch.request import Request
from dataset.flags import REQUIRED, flag, make_parser, parse_flags
from dataset.redaction import printable, redact
from dataset.stream.arrivals import ArrivalMap, State, Tally
from dataset.stream.asked_map import AskedMap
from dataset.stream.bounded import fetch_units
from dataset.stream.need_map import NeedMap
from dataset.stream.spec import NEVER, Needs, StreamedObject, StreamSpec, read_needs, read_spec
from dataset.stream.unit_fetch import UnitFetch
from dataset.stream.unit_map import UnitMap
from dataset.transfer.blocks import BlockMap
from dataset.transfer.engine import NoRanges, Transfer
from dataset.transfer.journal import num_chunks

log = logging.getLogger("trainyard.fetch")

NICENESS = 5
BEAT_S = 0.25
VAL_CONNECTIONS = 4  # beside the training's
MAX_CONNECTIONS = 64
_PR_SET_PDEATHSIG = 1
EXAMPLE = "example:\n  python -m dataset.stream.fetcher SPEC.json"
Tick = Callable[[Transfer], None]


@dataclass(frozen=True)
class FetcherFlags:
    """The flags of python -m dataset.stream.fetcher."""

    spec: Path = flag(REQUIRED, "the task, as a trainer writes it", "SPEC")
    parent: int | None = flag(None, "the process to end with", metavar="PID")


def main() -> int:
    flags = parse_flags(FetcherFlags, make_parser(__doc__, EXAMPLE))
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.INFO)
    _die_with(flags.parent)
    os.nice(NICENESS)
    spec = read_spec(flags.spec)
    kinds = (UnitMap if spec.cache else ArrivalMap, ArrivalMap)
    things = zip(kinds, (spec.train, spec.val), strict=True)
    maps = [kind(Path(thing.arrivals)) for kind, thing in things if thing]
    threading.Thread(target=_beat, args=(maps, flags.parent), daemon=True).start()
    fetch_stream(spec, maps)
    return 0


def fetch_stream(spec: StreamSpec, maps: Sequence[ArrivalMap]) -> None:
    """Fetches what a task names; whoever reads it learns by the maps why no more will come."""
    try:
        with take_folder(Path(spec.data_dir), f"a stream of {printable(redact(spec.train.url))}"):
            _Stream(spec).run()
    except CommandError as error:
        _fail(maps, error.exit_code, str(error))
        raise
    except OSError as error:
        text = describe_os_error(error)
        if text is not None:
            _fail(maps, USER_MISTAKE, text)
        raise


def _die_with(parent: int | None) -> None:
    """Ends this process when its parent ends, however that does."""
    if parent is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)


def _beat(maps: Iterable[ArrivalMap], parent: int | None) -> None:
    """The heart: in a thread of its own, since hashing the whole file takes minutes."""
    while parent is None or os.getppid() == parent:
        for arrivals in maps:
            arrivals.beat()
        time.sleep(BEAT_S)
    os._exit(0)


def _fail(maps: Iterable[ArrivalMap], code: int, text: str) -> None:
    for arrivals in maps:
        if arrivals.state is not State.WHOLE:
            arrivals.fail(code, printable(redact(text)))


class _Stream:
    """The objects of one task."""

    def __init__(self, spec: StreamSpec) -> None:
        self._spec = spec
        self._ledger = Ledger(Path(spec.data_dir))
        self._val: threading.Thread | None = None
        self._val_error: BaseException | None = None

    def run(self) -> None:
        """Fetches all of them; returns when each is verified and has its final name."""
        if self._spec.val_first:
            self._fetch_val(self._spec.connections)
        if self._spec.cache is not None:
            request = self._make_request(self._spec.connections)
            fetch_units(self._spec.train, self._spec.cache, request, self._follow_units)
        self._fetch(self._spec.train, self._spec.connections, self._follow_train)
        if self._val is None:
            self._fetch_val(self._spec.connections)
        else:
            self._val.join()
        self._check_val()

    def _follow_train(self, transfer: Transfer) -> None:
        """Lets the validation images come once the first steps have what they need."""
        self._check_val()
        if self._val is None and self._has_first_steps(transfer.blocks):
            self._start_val()

    def _follow_units(self, fetch: UnitFetch) -> None:
        """The same for a bounded cache."""
        self._check_val()
        enough = min(NEVER, fetch.cache.uses.least + self._spec.first_steps)
        if self._val is None and fetch.cache.first_need >= enough:
            self._start_val()

    def _start_val(self) -> None:
        self._val = threading.Thread(target=self._fetch_val_beside, daemon=True)
        self._val.start()

    def _has_first_steps(self, blocks: BlockMap) -> bool:
        if not isinstance(blocks, NeedMap):  # from front to back, val waits for its turn
            return isinstance(blocks, AskedMap)
        return blocks.first_need >= min(NEVER, blocks.least_need + self._spec.first_steps)

    def _fetch_val_beside(self) -> None:
        try:
            self._fetch_val(min(VAL_CONNECTIONS, self._spec.connections))
        except BaseException as error:
            self._val_error = error

    def _check_val(self) -> None:
        if self._val_error is not None:
            raise self._val_error

    def _fetch_val(self, connections: int) -> None:
        if self._spec.val is not None:
            self._fetch(self._spec.val, connections)

    def _fetch(
        self, thing: StreamedObject, connections: int, on_tick: Tick = lambda transfer: None
    ) -> None:
        arrivals = ArrivalMap(Path(thing.arrivals))
        if arrivals.state is State.WHOLE:  # so an earlier start of the fetcher found
            return
        needs = None
        if thing.needs:
            needs = read_needs(Path(thing.needs), num_chunks(arrivals.size))
        try:
            self._fetch_in_order(thing, arrivals, connections, on_tick, needs)
        except NoRanges as label:
            log.info("%s sends no parts of the object: all comes from front to back", label)
            plain = replace(thing, needs="", is_asked=False)
            self._fetch_in_order(plain, arrivals, connections, on_tick, None)
        arrivals.mark_all()

    def _fetch_in_order(
        self,
        thing: StreamedObject,
        arrivals: ArrivalMap,
        connections: int,
        on_tick: Tick,
        needs: Needs | None,
    ) -> None:
        request = self._make_request(connections)
        index = Path(thing.index) if thing.index else None
        job = FetchJob(
            request.parse(thing.url),
            Path(thing.path),
            self._ledger,
            index=index,
            make_map=partial(_make_map, thing, arrivals, needs),
            has_readers=True,
            asks_digest=True,
        )
        follower = _Follower(arrivals, connections, on_tick)
        fetch_object(job, request.access, request.options, follower.follow)

    def _make_request(self, connections: int) -> Request:
        spec = self._spec
        options = Options(connections, spec.stall_s, spec.give_up_s, spec.missing_s)
        token = Path(spec.token) if spec.token else None
        return Request(Path(spec.data_dir), options, spec.federation, token)


def _make_map(
    thing: StreamedObject,
    arrivals: ArrivalMap,
    needs: Needs | None,
    size: int,
    arrived: Iterable[int],
    claimed: Iterable[int],
) -> BlockMap:
    """The chunks of an object; readers are told of those that the index vouches for."""
    if size != arrivals.size:
        raise DataError(f"the object had {arrivals.size} bytes and has {size} now; start again")
    known = {*arrived, *claimed}
    for chunk in arrivals.here.copy().nonzero()[0].tolist():
        if chunk not in known:
            arrivals.unmark(chunk, chunk + 1)
    if thing.is_asked and needs is None and thing.index:
        return AskedMap(size, arrived, claimed, arrivals)
    marks = arrivals if thing.index else None
    if needs is None:
        return BlockMap(size, arrived, claimed, marks)
    return NeedMap(size, arrived, claimed, needs, marks)


class _Follower:
    """What is done at every tick of one transfer."""

    def __init__(self, arrivals: ArrivalMap, connections: int, on_tick: Tick) -> None:
        self._arrivals, self._connections, self._on_tick = arrivals, connections, on_tick
        self._before = arrivals.tally  # of earlier starts

    def follow(self, transfer: Transfer) -> None:
        if not transfer.blocks.is_front_to_back and not transfer.blocks.is_complete:
            transfer.leave_out_rangeless()
            is_short = self._arrivals.num_waiting > 0
            transfer.allow(min(MAX_CONNECTIONS, self._connections * (2 if is_short else 1)))
        self._count(transfer)
        self._on_tick(transfer)

    def _count(self, transfer: Transfer) -> None:
        before, store = self._before, transfer.store
        is_first = not before.fetched and not before.resumed
        twice = {
            cause: num_bytes + (before.twice or {}).get(cause, 0)
            for cause, num_bytes in vars(store.waste).items()
        }
        fetched = before.fetched + sum(server.bytes for server in transfer.servers.all)
        resumed = store.resumed_bytes if is_first else before.resumed
        self._arrivals.count(Tally(fetched, resumed, twice=twice))


if __name__ == "__main__":
    sys.exit(run_command(main))
