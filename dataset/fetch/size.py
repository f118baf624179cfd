"""The size of an object by a vote of its servers, before a transfer."""

from __future__ import annotations

import logging
import stat
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from dataset.errors import PassingError, UserError
from dataset.federation.connection import NETWORK_ERRORS, Answer
from dataset.federation.document import RIVAL_S, Watch, watching
from dataset.federation.framing import ProtocolError
from dataset.federation.lookup import Lookup
from dataset.federation.servers import Fault, Server
from dataset.spelling import decode
from dataset.transfer.receive import (
    OtherSize,
    check_answer,
    open_range,
    parse_content_range,
    read_problem,
)

log = logging.getLogger("trainyard.fetch")

VOTE_S = 0.5  # how long a first answer waits for a second one
DOUBT_S = 10.0  # the same when it differs from the size of the partial file
QUICK_S = 1.0
TICK_S = 0.05


def find_size(lookup: Lookup, known: int | None = None) -> int:
    """The size of the object by a vote of its servers; raises as the look-up does.

    The two nearest are asked at once, so that no single server decides, which may have another
    object under this name. When they differ, the origin decides. A silent one is not waited for.
    `known` is the size of an earlier start: one cache with another size does not make us discard
    the partial file. Nor does one server decide that the object is empty: broken servers say that.
    """
    if lookup.target.scheme == "file":
        lookup.refresh()
        return _measure_file(Path(decode(lookup.target.path)))
    started = time.monotonic()
    votes: dict[Server, int] = {}
    crashes: list[Exception] = []
    first_vote_at = None
    while True:
        now = time.monotonic()
        _ask_more(lookup, votes, crashes, now, known)
        with lookup.lock:
            if crashes:
                raise crashes[0]
            if votes and first_vote_at is None:
                first_vote_at = now
            voters = [s for s in lookup.servers.usable if s in votes]
            asked = [s for s in lookup.servers.usable if s.active]
            is_doubted = _is_doubted(set(votes.values()), known)
            wait_s = DOUBT_S if is_doubted else VOTE_S
            is_late = first_vote_at is not None and now - first_vote_at >= wait_s
            is_alone = not asked and (not is_doubted or _have_all_voted(lookup, votes))
            size = _count_votes(votes, voters, is_done=is_late or is_alone)
            if size is not None:
                for server in voters:
                    if votes[server] != size:
                        server.refuse(Fault.OTHER_SIZE, f"({votes[server]} bytes)")
                return size
        time.sleep(TICK_S if votes or now - started > QUICK_S else TICK_S / 10)
        _check_patience(lookup, votes, started)


def _check_patience(lookup: Lookup, votes: dict[Server, int], started: float) -> None:
    """Raises as the look-up does, and names servers that contradict each other."""
    try:
        lookup.check_patience(time.monotonic(), started)
    except PassingError:
        if len(set(votes.values())) < 2:
            raise
        told = ", ".join(f"{server.label} {size}" for server, size in votes.items())
        raise PassingError(
            f"{lookup.target.identity}: its sources disagree on its size in bytes ({told}), and no "
            "origin decides; try again later"
        ) from None


def _is_doubted(sizes: set[int], known: int | None) -> bool:
    """Whether other servers, including the origin, should confirm the size."""
    return 0 in sizes or (known is not None and known not in sizes)


def _have_all_voted(lookup: Lookup, votes: Collection[Server]) -> bool:
    """Whether all servers, including the origin, have given a size."""
    usable = lookup.servers.usable
    knows_origin = lookup.target.scheme != "pelican" or any(s.is_origin for s in usable)
    return knows_origin and all(server in votes for server in usable)


def _measure_file(path: Path) -> int:
    """The size of a local file; raises UserError for anything else."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        what = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
        raise UserError(f"{path} is {what}; give the URL of a file")
    return status.st_size


def _count_votes(votes: dict[Server, int], voters: list[Server], is_done: bool) -> int | None:
    """The size that has won; None while the vote is open."""
    sizes = [votes[server] for server in voters]
    best = max(set(sizes), key=sizes.count, default=None)
    if best is None or (len(sizes) == 1 and not is_done):
        return None
    if sizes.count(best) * 2 > len(sizes):
        return best
    return next((votes[server] for server in voters if server.is_origin), None)


def _ask_more(
    lookup: Lookup,
    votes: dict[Server, int],
    crashes: list[Exception],
    now: float,
    known: int | None,
) -> None:
    """Keeps two questions open until two servers agree; looks up again when all have failed.

    A silent server does not count: the next one is asked, as a silent block is hedged.
    """
    with lookup.lock:
        usable = lookup.servers.usable
        is_stuck = all(s.failures or _is_silent(s, now) for s in usable if s not in votes)
        sizes = set(votes.values())
        is_disputed = len(sizes) > 1 or bool(sizes and _is_doubted(sizes, known))
        is_silent = any(_is_silent(server, now) for server in usable)
    if ((is_stuck and not votes) or is_disputed) and lookup.is_due(now):
        _start(lookup, crashes, partial(lookup.refresh, with_origin=is_disputed or is_silent))
    with lookup.lock:
        usable = lookup.servers.usable
        wanted = 2 if not is_disputed else len(usable)
        for server in usable:
            num_open = sum(s in votes or (s.active > 0 and not _is_silent(s, now)) for s in usable)
            is_free = server not in votes and not server.active and server.blocked_until <= now
            if is_free and num_open < wanted:
                server.begin(now)
                _start(lookup, crashes, partial(_ask_size, lookup, server, votes))


def _is_silent(server: Server, now: float) -> bool:
    return server.active > 0 and now - server.asked_at >= RIVAL_S


def _start(lookup: Lookup, crashes: list[Exception], work: Callable[[], None]) -> None:
    """Runs the work in a thread of its own; an unexpected exception goes to `crashes`."""

    def run() -> None:
        try:
            work()
        except Exception as error:
            with lookup.lock:
                crashes.append(error)

    threading.Thread(target=run, daemon=True).start()


def _ask_size(lookup: Lookup, server: Server, votes: dict[Server, int]) -> None:
    """Asks one server, and notes the result."""
    problem = None
    try:
        size = ask_size(lookup, server)
    except NETWORK_ERRORS as error:
        problem = read_problem(error)
    with lookup.lock:
        server.end()
        if problem is None:
            votes[server] = size
        else:
            lookup.tell(server.label, problem.text)
            lookup.servers.failed(server, time.monotonic(), problem)
    if problem is not None and problem.is_denied:
        lookup.reread_token()


def ask_size(lookup: Lookup, server: Server) -> int:
    """The size of the object at one server, from a request for one byte."""
    with watching(lookup.pool.timeout_s) as watch:
        return _ask_size_once(lookup, server, watch)


def _ask_size_once(lookup: Lookup, server: Server, watch: Watch) -> int:
    answer: Answer | None = None
    keep = False
    try:
        answer = open_range(lookup.pool, lookup, server, 0, 1, watch.hold)
        is_plain = answer.status == 206 and parse_content_range(answer)[2] == 0
        if is_plain:
            # XRootD 5.5 says this of an empty object, and so may a broken server of another one.
            answer.connection.close()
            answer = open_range(lookup.pool, lookup, server, 0, None, watch.hold)
        found = check_answer(answer, 0, 1, None, server)
        server.note_answer(found.etag, found.is_range, was_range_asked=not is_plain)
        if answer.status == 206:
            size = parse_content_range(answer)[2]
            if answer.readinto(memoryview(bytearray(1))) != 1:
                raise ProtocolError("ended early")
            watch.let_go()
            keep = answer.release(1)
            return size
        assert answer.length is not None  # checked by check_answer
        return answer.length
    except OtherSize as error:  # 416: there is no first byte
        return error.size
    finally:
        if answer is not None and keep:
            lookup.pool.give(answer.connection)
        elif answer is not None:
            answer.connection.close()
