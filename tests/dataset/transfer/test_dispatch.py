"""Who is asked for what: no lease waits while somebody could bring it."""

from __future__ import annotations

import random

import pytest

from dataset.federation.lookup import Options
from dataset.federation.servers import Server, Servers
from dataset.transfer.blocks import BlockMap, Lease
from dataset.transfer.dispatch import AVOID_S, FIRST_HEDGE_S, Dispatcher
from dataset.transfer.journal import CHUNK


def make(num_sources: int, num_chunks: int = 16) -> tuple[Dispatcher, BlockMap, list[Server]]:
    servers = Servers(3, random.Random(0))
    servers.update([f"http://c{n}/x" for n in range(num_sources)], wants_token=False)
    blocks = BlockMap(num_chunks * CHUNK)
    return Dispatcher(blocks, servers, Options(connections=4)), blocks, servers.all


def make_head_avoid(blocks: BlockMap, server: Server) -> Lease:
    """The first 4 MiB were wrong from this source."""
    head = blocks.take(4, blocks.peek())
    head.avoid = frozenset({server})
    blocks.put(head)
    return head


def rest(server: Server, until: float) -> None:
    server.failures, server.blocked_until, server.told_to_wait_until = 1, until, until


def test_a_head_that_cannot_be_placed_does_not_hold_up_what_follows() -> None:
    dispatcher, blocks, (healthy, resting) = make(2)
    make_head_avoid(blocks, healthy)
    rest(resting, until=300.0)
    lease = dispatcher.dispatch(0.0)
    assert lease is not None
    assert (lease.first, lease.end, lease.server) == (4, 8, healthy)
    assert blocks.peek() is not None, "the head is still waiting"


def test_a_head_that_cannot_be_placed_asks_for_others_and_goes_to_them() -> None:
    dispatcher, blocks, (healthy, resting) = make(2)
    head = make_head_avoid(blocks, healthy)
    rest(resting, until=300.0)
    dispatcher.dispatch(0.0)
    dispatcher.watch(0.5)
    assert not dispatcher.needs_company, "a moment is no reason for a look-up"
    dispatcher.watch(1.5)
    assert dispatcher.needs_company
    dispatcher._servers.update(["http://origin/x"], wants_token=False, is_origin=True)
    assert dispatcher.dispatch(2.0) is head
    assert head.server is not None and head.server.is_origin
    dispatcher.watch(2.5)
    assert not dispatcher.needs_company


def test_what_should_be_avoided_is_asked_when_nobody_else_came() -> None:
    dispatcher, blocks, (healthy, resting) = make(2, num_chunks=4)
    head = make_head_avoid(blocks, healthy)
    rest(resting, until=300.0)
    assert dispatcher.dispatch(0.0) is None
    assert dispatcher.dispatch(AVOID_S - 1) is None
    assert dispatcher.dispatch(AVOID_S) is head
    assert head.server is healthy


def test_a_block_that_all_sent_wrong_waits_for_the_origin_and_no_longer() -> None:
    dispatcher, blocks, (only,) = make(1, num_chunks=4)
    head = make_head_avoid(blocks, only)
    assert dispatcher.dispatch(0.0) is None
    dispatcher.watch(0.0)
    assert dispatcher.needs_company
    dispatcher._servers.are_all = True  # the director named nobody else
    assert dispatcher.dispatch(0.1) is head


def test_a_lease_from_behind_leaves_the_others_in_order() -> None:
    blocks = BlockMap(8 * CHUNK, arrived=[1, 3, 5])  # missing: 0, 2, 4, 6-7
    found = next(lease for lease in blocks.iter_waiting() if lease.first == 4)
    assert blocks.take(4, found) is found
    starts = []
    while blocks.peek() is not None:
        starts.append(blocks.take(4).first)
    assert starts == [0, 2, 6]


def test_first_connections_that_all_fall_silent_are_hedged_after_seconds() -> None:
    dispatcher, _, (silent, other) = make(2)
    other.blocked_until = 0.5
    lease = dispatcher.dispatch(0.0)
    assert lease is not None and lease.server is silent
    assert not dispatcher.watch(FIRST_HEDGE_S - 0.1), "a cold cache takes a moment"
    assert dispatcher.watch(FIRST_HEDGE_S)
    rival = dispatcher.dispatch(FIRST_HEDGE_S)
    assert rival is lease.rival
    assert rival is not None and rival.server is other


def test_a_first_connection_that_trickles_is_not_hedged() -> None:
    dispatcher, _, _ = make(2)
    lease = dispatcher.dispatch(0.0)
    assert lease is not None
    for now in range(1, 15):
        lease.progress_at = float(now)
        assert not dispatcher.watch(now + 0.9)


def test_a_silent_block_is_not_hedged_to_those_that_sent_it_wrong() -> None:
    dispatcher, blocks, (wrong, silent) = make(2, num_chunks=4)
    make_head_avoid(blocks, wrong)
    lease = dispatcher.dispatch(0.0)
    assert lease is not None and lease.server is silent
    assert not dispatcher.watch(FIRST_HEDGE_S)
    assert dispatcher.needs_company


class UrgentMap(BlockMap):
    """All of it is urgent."""

    def is_urgent(self, lease: Lease) -> bool:
        return True


def make_running(
    blocks: BlockMap, num_sources: int, num_leases: int
) -> tuple[Dispatcher, list[Lease]]:
    """Leases that began at 0, with a median of 0.4 s a chunk."""
    servers = Servers(3, random.Random(0))
    servers.update([f"http://c{n}/x" for n in range(num_sources)], wants_token=False)
    servers.note_all()
    dispatcher = Dispatcher(blocks, servers, Options(connections=16))
    dispatcher.allow(16)
    blocks.record_chunk_time(0.4)
    leases = [dispatcher.dispatch(0.0) for _ in range(num_leases)]
    return dispatcher, [lease for lease in leases if lease is not None]


@pytest.mark.parametrize(("kind", "num_hedges"), [(BlockMap, 0), (UrgentMap, 1)])
def test_a_silent_lease_is_hedged_sooner_if_it_is_urgent(
    kind: type[BlockMap], num_hedges: int
) -> None:
    dispatcher, leases = make_running(kind(64 * CHUNK), 2, 4)
    for lease in leases[1:]:
        lease.note_progress(1.4)
    dispatcher.watch(1.5)
    assert dispatcher.num_hedges == num_hedges
    assert (leases[0].rival is not None) == bool(num_hedges)


def test_one_silent_connection_is_not_held_against_a_server_that_delivers() -> None:
    dispatcher, leases = make_running(UrgentMap(64 * CHUNK), 2, 4)
    first, same = [lease for lease in leases if lease.server is leases[0].server]
    same.note_progress(1.4)
    for lease in leases:
        if lease.server is not first.server:
            lease.note_progress(1.4)
    dispatcher.watch(1.5)
    assert first.rival is not None and first.server is not None
    assert first.server.stalls == 0
    same.note_progress(0.0)
    dispatcher.watch(1.6)
    assert same.rival is not None and first.server.stalls == 1


def test_an_urgent_lease_is_asked_again_of_the_only_server_there_is() -> None:
    dispatcher, (silent, *others) = make_running(UrgentMap(64 * CHUNK), 1, 4)
    for lease in others:
        lease.note_progress(1.4)
    dispatcher.watch(1.5)
    again = dispatcher.dispatch(1.5)
    assert again is silent.rival and again is not None
    assert again.server is silent.server


def test_an_urgent_lease_that_trickles_is_not_waited_for() -> None:
    dispatcher, (slow, *others) = make_running(UrgentMap(64 * CHUNK), 2, 4)
    for lease in others:
        lease.note_progress(3.9)
        lease.end_chunk()
    slow.note_progress(3.9)
    dispatcher.watch(4.0)
    assert dispatcher.num_hedges == 1 and slow.rival is not None


def test_a_wrong_head_goes_to_any_server_after_a_moment_if_it_is_urgent() -> None:
    servers = Servers(3, random.Random(0))
    servers.update(["http://a/x", "http://b/x"], wants_token=False)
    healthy, resting = servers.all
    dispatcher = Dispatcher(UrgentMap(4 * CHUNK), servers, Options(connections=4))
    head = make_head_avoid(dispatcher._blocks, healthy)
    rest(resting, until=300.0)
    assert dispatcher.dispatch(0.0) is None
    assert dispatcher.dispatch(0.9) is None
    assert dispatcher.dispatch(1.1) is head and head.server is healthy


def test_more_connections_may_be_allowed_before_the_speed_is_known() -> None:
    dispatcher, blocks, _ = make(1, num_chunks=64)
    assert len([n for n in range(9) if dispatcher.dispatch(0.0)]) == 4
    dispatcher.allow(6)
    assert len([n for n in range(9) if dispatcher.dispatch(0.0)]) == 2
    assert blocks.peek() is not None
