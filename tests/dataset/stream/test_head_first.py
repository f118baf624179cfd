"""The bytes of the first step have the link for themselves: bytes and requests are counted."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from dataset.federation.lookup import Options
from dataset.federation.servers import Server, Servers
from dataset.stream.need_map import NeedMap
from dataset.stream.spec import NEVER
from dataset.transfer.blocks import ARRIVED, BLOCK_CHUNKS, Lease
from dataset.transfer.dispatch import HEDGE_S, Dispatcher
from dataset.transfer.journal import CHUNK
from tests.dataset.small_server import Handler
from tests.dataset.stream.streams import (
    CONTENT,
    NUM_CHUNKS,
    Stage,
    find_chunk,
    first_chunks,
    serving_counted,
    wait_until,
)


def make(
    needs: list[int], claimed: tuple[int, ...] = (), num_sources: int = 2
) -> tuple[Dispatcher, NeedMap, list[Server]]:
    """A dispatcher of 16 connections that may all be open from the start."""
    servers = Servers(3, random.Random(0))
    servers.update([f"http://c{n}/x" for n in range(num_sources)], wants_token=False)
    blocks = NeedMap(len(needs) * CHUNK, (), claimed, np.array(needs, np.int32))
    dispatcher = Dispatcher(blocks, servers, Options(connections=16))
    dispatcher.allow(16)
    return dispatcher, blocks, servers.all


def take_all(dispatcher: Dispatcher, now: float = 0.0) -> list[Lease]:
    taken = []
    while (lease := dispatcher.dispatch(now)) is not None:
        taken.append(lease)
    return taken


def finish(dispatcher: Dispatcher, blocks: NeedMap, lease: Lease) -> None:
    for chunk in range(lease.position, lease.end):
        blocks.state[chunk] = ARRIVED
        blocks.mark_done(chunk)
        lease.end_chunk()
    dispatcher.out.discard(lease)


def list_needs(blocks: NeedMap, leases: list[Lease]) -> list[int]:
    return [blocks._needs[lease.first] for lease in leases]


def test_only_the_first_step_is_asked_for_until_it_is_complete() -> None:
    dispatcher, blocks, _ = make([0, 3, 0, 2, 1, 4, 0, 2, 1, 3])
    head = take_all(dispatcher)
    assert [lease.first for lease in head] == [0, 2, 6]
    for lease in head[:2]:
        finish(dispatcher, blocks, lease)
        assert dispatcher.dispatch(0.0) is None
    finish(dispatcher, blocks, head[2])
    assert set(list_needs(blocks, take_all(dispatcher))) == {1, 2}


def test_each_complete_step_lets_requests_reach_one_step_further() -> None:
    dispatcher, blocks, _ = make([step for step in range(40) for _ in range(2)])
    reaches = []
    for step in range(8):
        reaches.append(max(list_needs(blocks, [*dispatcher.out, *take_all(dispatcher)])))
        for lease in [o for o in dispatcher.out if blocks._needs[o.first] == step]:
            finish(dispatcher, blocks, lease)
    assert reaches == [0, 2, 4, 6, 8, 10, 12, 14]
    take_all(dispatcher)
    assert len(dispatcher.out) == 16  # all connections are busy


def test_the_first_step_is_shared_by_all_connections() -> None:
    dispatcher, _, _ = make([0] * 12 + [1] * 12)
    assert sorted((o.first, o.end) for o in take_all(dispatcher)) == [(n, n + 1) for n in range(12)]


def test_a_first_step_with_work_for_all_is_asked_for_in_long_requests() -> None:
    dispatcher, _, _ = make([0] * 200 + [1] * 12)
    assert {o.end - o.first for o in take_all(dispatcher)} == {BLOCK_CHUNKS}


def test_what_no_step_uses_is_asked_for_in_long_requests_at_the_end() -> None:
    dispatcher, blocks, _ = make([0, *[NEVER] * 200])
    (head,) = take_all(dispatcher)
    finish(dispatcher, blocks, head)
    assert sum(o.end - o.first == BLOCK_CHUNKS for o in take_all(dispatcher)) > 8


def test_a_silent_head_holds_up_nothing() -> None:
    dispatcher, _, _ = make([0, 5, 6])
    (head,) = take_all(dispatcher)
    dispatcher.watch(10.0)  # hedged, since no speed is known yet
    assert head.rival is not None and head.stall_counted
    (rival, *others) = take_all(dispatcher, 10.0)
    assert rival is head.rival and others == []  # which is under way instead
    rival.note_stall()
    assert [lease.first for lease in take_all(dispatcher, 10.0)] == [1, 2]


def test_a_head_that_nobody_can_bring_holds_up_nothing() -> None:
    dispatcher, blocks, (first, second) = make([0, 5, 6])
    (head,) = take_all(dispatcher)
    dispatcher.out.discard(head)
    head.avoid = frozenset({first})
    blocks.give_back(head)
    second.failures, second.blocked_until, second.told_to_wait_until = 1, 300.0, 300.0
    assert [lease.first for lease in take_all(dispatcher, 0.5 * HEDGE_S)] == [1, 2]


def test_a_fetcher_that_goes_on_begins_with_the_first_step_that_lacks_something() -> None:
    """What an earlier start left is not looked at yet, and is no reason to ask for later steps."""
    dispatcher, _, _ = make([0, 1, 2, 3, 3, 4, 5], claimed=(0, 1, 2))
    assert [lease.first for lease in take_all(dispatcher)] == [3, 4]


def test_before_the_first_step_no_byte_of_a_later_one_is_sent(tmp_path: Path) -> None:
    """Its requests are answered when all of them are there: then the others would be there too."""
    stage, needs = Stage(tmp_path), np.arange(NUM_CHUNKS, dtype=np.int32) % 6
    head = np.flatnonzero(needs == 0)
    sent_at_head: list[int] = []

    def note(handler: Handler) -> bool:
        chunk = find_chunk(handler)
        if chunk in head:
            wait_until(lambda: set(first_chunks(seen)) >= set(head))
        elif chunk is not None and not sent_at_head:
            sent_at_head.append(sum(sent))
        return False

    with serving_counted(misbehave=note) as (url, seen, sent):
        stage.run(stage.make(url, needs, connections=16))
    assert set(first_chunks(seen)[: len(head)]) == set(head)
    assert sum(sent_at_head) <= 1.3 * len(head) * CHUNK
    assert stage.path.read_bytes() == CONTENT
