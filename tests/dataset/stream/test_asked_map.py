"""What a reader waits for comes first; the rest from front to back, and nothing twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataset.stream.arrivals import ArrivalMap
from dataset.stream.asked_map import AskedMap
from dataset.transfer.blocks import ARRIVED, MISSING, BlockMap, Lease
from dataset.transfer.journal import CHUNK

NUM = 100


@pytest.fixture
def marks(tmp_path: Path) -> ArrivalMap:
    return ArrivalMap.create(tmp_path / "map", NUM * CHUNK)


def ask(marks: ArrivalMap, *chunks: int) -> None:
    for chunk in chunks:
        marks.ask(chunk * CHUNK + 5, chunk * CHUNK + 6)


def take(blocks: BlockMap, max_chunks: int = 4) -> tuple[int, int]:
    """The next run: it is fetched at once."""
    lease = take_slowly(blocks, max_chunks)
    finish(blocks, lease)
    return lease.first, lease.end


def take_slowly(blocks: BlockMap, max_chunks: int = 4) -> Lease:
    head = blocks.peek()
    assert head is not None
    return blocks.take(max_chunks, head)


def finish(blocks: BlockMap, lease: Lease) -> None:
    for chunk in range(lease.position, lease.end):
        assert blocks.state[chunk] == MISSING
        blocks.state[chunk] = ARRIVED
        blocks.mark_done(chunk)
        lease.end_chunk()


def test_what_is_asked_for_comes_next_and_alone(marks: ArrivalMap) -> None:
    blocks = AskedMap(NUM * CHUNK, (), (), marks)
    assert take(blocks) == (0, 4)
    ask(marks, 50, 70, 71)
    assert [take(blocks), take(blocks), take(blocks)] == [(50, 51), (70, 72), (4, 8)]
    ask(marks, 50, 72)  # one that is here
    assert take(blocks) == (72, 73)
    while not blocks.is_complete:
        take(blocks, 64)
    assert marks.here.all() and blocks.peek() is None


def test_what_is_under_way_is_not_asked_for_again(marks: ArrivalMap) -> None:
    blocks = AskedMap(NUM * CHUNK, (), (), marks)
    running = take_slowly(blocks)
    ask(marks, 2)
    assert take(blocks) == (4, 8)
    assert blocks.is_urgent(running)
    running.cancel("stalled")
    blocks.give_back(running)  # then it is the first
    assert take(blocks) == (0, 4)


def test_a_later_fetcher_knows_what_was_asked_for(marks: ArrivalMap) -> None:
    ask(marks, 90)
    marks.mark(5)
    blocks = AskedMap(NUM * CHUNK, (), (5, 90, 91), marks)
    assert blocks.order_claims((5, 91, 90)) == [90, 91, 5]
    blocks.drop(90, 91, frozenset())  # it was wrong
    assert take(blocks) == (90, 91)
