"""The order of need: what the next step lacks comes first, and nothing is forgotten."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dataset.stream import need_map
from dataset.stream.need_map import NeedMap
from dataset.stream.spec import NEVER
from dataset.transfer.blocks import ARRIVED, DONE, MISSING, Lease
from dataset.transfer.journal import CHUNK
from tests.dataset.transfer.chunk_walk import walk


def make(needs: list[int], arrived: tuple[int, ...] = (), claimed: tuple[int, ...] = ()) -> NeedMap:
    blocks = NeedMap(len(needs) * CHUNK, arrived, claimed, np.array(needs, np.int32))
    for chunk in arrived:
        blocks.mark_done(chunk)
    return blocks


def finish(blocks: NeedMap, lease: Lease) -> None:
    for chunk in range(lease.position, lease.end):
        assert blocks.state[chunk] == MISSING
        blocks.state[chunk] = ARRIVED
        blocks.mark_done(chunk)
        lease.end_chunk()


def take_all(blocks: NeedMap) -> list[tuple[int, int]]:
    taken = []
    while (head := blocks.peek()) is not None:
        lease = blocks.take(64, head)
        taken.append((lease.first, lease.end))
        finish(blocks, lease)
    assert blocks.is_complete
    return taken


def test_neighbours_of_one_step_come_together_and_in_the_order_of_the_steps() -> None:
    assert take_all(make([7, 7, 3, 3, 3, 9, 1])) == [(6, 7), (2, 5), (0, 2), (5, 6)]


def test_a_request_for_something_needed_has_at_most_4_mib() -> None:
    assert take_all(make([5] * 9)) == [(0, 4), (4, 8), (8, 9)]


def test_what_no_step_uses_comes_last_and_in_long_requests() -> None:
    assert take_all(make([NEVER] * 9 + [3])) == [(9, 10), (0, 9)]


def test_neighbours_that_are_needed_far_away_and_about_together_are_one_request() -> None:
    assert take_all(make([0, 800, 790, 2])) == [(0, 1), (3, 4), (1, 3)]


def test_only_some_runs_are_queued_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(need_map, "HORIZON", 10)
    needs = random.Random(1).sample(range(0, 100_000, 10), 500)
    blocks = make(needs)
    longest = 0
    order = []
    while (head := blocks.peek()) is not None:
        longest = max(longest, len(blocks._queue))
        lease = blocks.take(4, head)
        order.append(min(needs[lease.first : lease.end]))
        finish(blocks, lease)
    assert longest <= 11
    assert len(order) > 400 and order == sorted(order)


def test_what_comes_back_is_placed_by_need_before_what_was_not_queued_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(need_map, "HORIZON", 2)
    blocks = make([50, 10, 40, 20, 30], arrived=(0, 2))
    blocks.drop(0, 1, frozenset())
    blocks.drop(2, 3, frozenset())
    assert [first for first, _ in take_all(blocks)] == [1, 3, 4, 2, 0]


def test_a_broken_request_goes_on_before_what_is_needed_later() -> None:
    blocks = make([5, 5, 5, 5, 1, 9])
    finish(blocks, blocks.take(4, blocks.peek()))
    lease = blocks.take(4, blocks.peek())
    lease.end_chunk()
    blocks.give_back(lease)
    again = blocks.peek()
    assert again is not None and (again.first, again.end) == (1, 4)


def test_the_first_step_that_lacks_something_is_known() -> None:
    blocks = make([3, 1, 2, NEVER])
    assert (blocks.first_need, blocks.least_need) == (1, 1)
    for chunk, need in ((2, 1), (1, 3), (0, NEVER)):
        blocks.state[chunk] = ARRIVED
        blocks.mark_done(chunk)
        assert blocks.first_need == need
    blocks.drop(1, 2, frozenset())
    assert blocks.first_need == 1


def test_what_the_next_step_lacks_is_urgent_and_nothing_that_no_step_uses() -> None:
    blocks = make([5, 6, 7, NEVER])
    assert [blocks.is_urgent(Lease(n, n + 1)) for n in range(4)] == [True, True, False, False]
    blocks = make([5, NEVER], arrived=(0,))
    assert not blocks.is_urgent(Lease(1, 2))


def test_claims_are_read_again_in_the_order_of_need() -> None:
    assert make([3, 1, 2, 0], claimed=(0, 1, 2)).order_claims([0, 1, 2]) == [1, 2, 0]


@pytest.mark.parametrize("seed", range(20))
def test_any_mix_of_breaks_hedges_and_wrong_chunks_ends_complete(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(need_map, "HORIZON", 5)
    chance = random.Random(seed)
    num = chance.randrange(1, 60)
    steps = [chance.choice([chance.randrange(40), 7, NEVER]) for _ in range(num)]
    blocks = make(steps)

    def drop_a_chunk(lease: Lease) -> bool:
        first = chance.randrange(num)
        if blocks.state[first] == DONE:
            blocks.drop(first, first + 1, frozenset())
        return True

    walk(blocks, chance, drop_a_chunk)
    assert blocks.is_complete
    assert blocks.first_need == NEVER
