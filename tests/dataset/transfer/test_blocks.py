"""The book-keeping of chunks: nothing is lost, nothing is handed out twice without need."""

from __future__ import annotations

import os
import random
import threading
import tracemalloc
from pathlib import Path

import pytest

from dataset.federation.servers import Problem, Server, Servers
from dataset.transfer.blocks import ARRIVED, MISSING, BlockMap, Lease
from dataset.transfer.journal import CHUNK, Arrivals, Journal, num_chunks
from dataset.transfer.store import ChunkStore
from tests.dataset.transfer.chunk_walk import walk


def finish(blocks: BlockMap, lease: Lease) -> None:
    for chunk in range(lease.position, lease.end):
        assert blocks.state[chunk] == MISSING, "a chunk was handed out twice"
        blocks.state[chunk] = ARRIVED
        blocks.mark_done(chunk)
        lease.position += 1


def test_all_is_handed_out_once_from_the_front() -> None:
    blocks = BlockMap(23 * CHUNK + 1, arrived=[0, 1, 9])
    for chunk in (0, 1, 9):
        blocks.mark_done(chunk)
    starts = []
    while blocks.peek() is not None:
        lease = blocks.take(8)
        starts.append(lease.first)
        finish(blocks, lease)
    assert blocks.is_complete
    assert starts == sorted(starts)
    assert blocks.prefix == 24


def test_requests_end_on_whole_blocks_of_4_mib() -> None:
    blocks = BlockMap(40 * CHUNK, arrived=[0])
    blocks.peek()
    assert blocks.take(6).end == 4
    blocks.peek()
    assert blocks.take(9).end == 12


def test_what_a_broken_lease_leaves_comes_back() -> None:
    blocks = BlockMap(8 * CHUNK)
    blocks.peek()
    lease = blocks.take(8)
    lease.position = 3
    blocks.give_back(lease)
    again = blocks.peek()
    assert again is not None and (again.first, again.end) == (3, 8)


def test_a_hedged_lease_leaves_its_rest_to_its_rival() -> None:
    server = Server("http://a/x", "a")
    blocks = BlockMap(8 * CHUNK)
    blocks.peek()
    victim = blocks.take(8)
    victim.server, victim.position = server, 2
    blocks.hedge(victim)
    blocks.give_back(victim)  # the silent connection dies: nothing new is queued
    waiting = blocks.peek()
    assert waiting is not None and (waiting.first, waiting.end) == (2, 8)
    assert server in waiting.avoid
    blocks.take(8)
    assert blocks.peek() is None


def test_the_first_of_two_rivals_to_finish_a_chunk_wins() -> None:
    blocks = BlockMap(8 * CHUNK)
    blocks.peek()
    victim = blocks.take(8)
    victim.server = Server("http://a/x", "a")
    blocks.hedge(victim)
    rival = victim.rival
    assert rival is not None
    assert blocks.settle_rivals(victim) is rival
    rival.cancel("lost")
    assert blocks.peek() is None, "a lost rival is not started any more"


def test_half_of_a_slow_lease_can_be_taken_over() -> None:
    blocks = BlockMap(16 * CHUNK)
    blocks.peek()
    victim = blocks.take(16)
    victim.position = 5
    half = blocks.split(victim)
    assert (victim.end, half.first, half.end) == (11, 11, 16)


def test_wrong_chunks_are_missing_again() -> None:
    blocks = BlockMap(4 * CHUNK, arrived=range(4))
    for chunk in range(4):
        blocks.mark_done(chunk)
    blocks.drop(1, 3, frozenset())
    assert not blocks.is_complete
    assert blocks.prefix == 1
    waiting = blocks.peek()
    assert waiting is not None and (waiting.first, waiting.end) == (1, 3)


@pytest.mark.parametrize("seed", range(30))
def test_any_mix_of_breaks_hedges_and_splits_ends_complete(seed: int) -> None:
    chance = random.Random(seed)
    blocks = BlockMap(chance.randrange(1, 60 * CHUNK))

    def split(lease: Lease) -> bool:
        if lease.rival is not None or lease.remaining < 2:
            return False
        blocks.put(blocks.split(lease))
        return True

    walk(blocks, chance, split)
    assert blocks.is_complete


def test_requests_grow_with_speed_and_shrink_near_the_end() -> None:
    blocks = BlockMap(4000 * CHUNK)
    assert blocks.block_chunks(0.0, 8) == 4
    assert blocks.block_chunks(10 * CHUNK, 8) == 20
    assert blocks.block_chunks(1e9, 8) == 64
    assert BlockMap(100 * CHUNK).block_chunks(1e9, 8) == 4


def make_sources(num: int) -> Servers:
    servers = Servers(3, random.Random(0))
    servers.update([f"http://c{n}/x" for n in range(num)], wants_token=False)
    return servers


def test_the_nearest_few_share_the_work_by_speed() -> None:
    servers = make_sources(5)
    for server, rate in zip(servers.all, (30e6, 10e6, 10e6, 99e6, 99e6), strict=True):
        servers.delivered(server, int(rate), 1.0)
    for _ in range(10):
        picked = servers.pick(0.0)
        assert picked is not None
        picked.active += 1
    assert [server.active for server in servers.all] == [6, 2, 2, 0, 0]


def test_a_failed_source_rests_longer_every_time_and_then_gets_one_try() -> None:
    servers = make_sources(1)
    (server,) = servers.all
    servers.update(["http://other/x"], wants_token=False)
    servers.all[1].active = 1
    rests = []
    for _ in range(12):
        servers.failed(server, 0.0, Problem("503", 503))
        rests.append(server.blocked_until)
        assert servers.pick(0.0) is servers.all[1]
    assert rests == sorted(rests)
    assert rests[0] <= 0.5 and 30 <= rests[-1] <= 60
    assert servers.pick(61.0) is server
    server.active = 1
    assert servers.pick(61.0) is servers.all[1]
    servers.delivered(server, 1, 1.0)
    server.active = 0
    assert servers.pick(61.0) is server


def test_when_nobody_delivers_a_resting_source_is_tried_again_soon_but_not_for_ever() -> None:
    servers = make_sources(2)
    for server in servers.all:
        for _ in range(10):
            servers.failed(server, 0.0, Problem("503", 503))
    assert servers.pick(3.9) is None
    assert servers.pick(4.1) is not None
    for server in servers.all:
        for _ in range(20):
            servers.failed(server, 0.0, Problem("503", 503))
    assert servers.pick(4.1) is None


def test_a_source_that_broke_off_after_whole_chunks_rests_briefly() -> None:
    servers = make_sources(1)
    (server,) = servers.all
    for _ in range(10):
        servers.failed(server, 0.0, Problem("503", 503))
    server.blocked_until = 0.0
    servers.failed(server, 0.0, Problem("ended early"), has_delivered=True)
    assert server.blocked_until <= 0.5


def test_retry_after_is_heeded_within_reason() -> None:
    servers = make_sources(1)
    servers.failed(servers.all[0], 0.0, Problem("429", 429, 30))
    assert servers.all[0].blocked_until == 30
    assert servers.pick(29.0) is None
    servers.failed(servers.all[0], 0.0, Problem("429", 429, 1e9))
    assert servers.all[0].blocked_until == 300


def test_the_origin_is_for_when_the_caches_failed() -> None:
    servers = make_sources(1)
    servers.update(["http://origin/x"], wants_token=False, is_origin=True)
    assert servers.pick(0.0) is servers.all[0]
    servers.failed(servers.all[0], 0.0, Problem("500", 500))
    assert servers.pick(0.0) is servers.all[1]


def test_a_source_of_wrong_bytes_is_dropped_only_while_there_is_another() -> None:
    servers = make_sources(2)
    for server in servers.all:
        for _ in range(3):
            servers.sent_wrong_block(server)
    assert servers.all[0].refused
    assert not servers.all[1].refused
    assert servers.all[0].describe()["refused"] == "sends wrong bytes"


def test_everyone_must_agree_that_an_object_is_missing() -> None:
    servers = make_sources(2)
    servers.failed(servers.all[0], 0.0, Problem("404", 404))
    assert not servers.agree_on("missing")
    servers.failed(servers.all[1], 0.0, Problem("404", 404))
    assert servers.agree_on("missing")
    servers.failed(servers.all[1], 0.0, Problem("503", 503))
    assert not servers.agree_on("missing")


def test_what_an_answer_means_is_told_by_its_status_and_not_by_its_words() -> None:
    servers = make_sources(1)
    servers.failed(servers.all[0], 0.0, Problem("404"))  # an error that merely says so
    assert not servers.agree_on("missing")
    servers.failed(servers.all[0], 0.0, Problem("a page in any language", 404))
    assert servers.agree_on("missing")
    servers.failed(servers.all[0], 0.0, Problem("a page in any language", 401))
    assert servers.agree_on("denied")


@pytest.mark.parametrize("size", [10**10, pytest.param(138 * 10**9, marks=pytest.mark.soak)])
def test_the_books_of_an_object_like_imagenet_take_little_memory(tmp_path: Path, size: int) -> None:
    """200 MB for 138 GB, and as much a byte for a smaller one."""
    fd = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT)
    tracemalloc.start()
    arrivals = Arrivals("pelican://f/x", size, ("crc32c",), "boot")
    arrivals.chunks = {chunk: (0, (chunk,)) for chunk in range(0, num_chunks(size), 2)}
    arrivals.were_read = True
    journal = Journal.create(tmp_path / "j", arrivals)
    store = ChunkStore(fd, journal, arrivals, threading.RLock(), make_sources(2))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    os.close(fd)
    assert store.blocks.num_done == len(arrivals.chunks)
    assert peak < 200e6 * size / 138e9
