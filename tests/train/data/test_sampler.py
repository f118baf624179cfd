"""The samples of a global step depend on seed, epoch and step alone, whatever cuts the batch."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from train.data.sampler import (
    BatchPlan,
    derive_key,
    epoch_order,
    sample_uniforms,
    split_validation,
)

SEEDS = st.integers(0, 2**63)
EPOCHS = st.integers(0, 10_000)
FIRST_ORDER = [1, 8, 9, 3, 6, 5, 0, 7, 4, 2]
OTHER_ORDER = [7, 0, 5, 9, 3, 4, 2, 8, 6, 1]
KEY = 15020427595393229491
UNIFORMS = [[0.2927969323480253, 0.3907982901250958], [0.6462988280485943, 0.6065092278750916]]


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """(samples, batch, microbatch, ranks) that divide as the trainer demands."""
    microbatch, parts, world = (draw(st.integers(1, n)) for n in (5, 4, 4))
    batch = microbatch * parts * world
    return draw(st.integers(batch, 6 * batch)), batch, microbatch, world


def steps_of(order: np.ndarray, cut: tuple[int, int, int, int]) -> list[list[list[int]]]:
    """The microbatches of each step of an epoch, put together from all ranks."""
    num_samples, batch, microbatch, world = cut
    plans = [BatchPlan(num_samples, batch, microbatch, rank, world) for rank in range(world)]
    return [
        [plan.select(order, step, part).tolist() for plan in plans for part in plan.my_microbatches]
        for step in range(plans[0].steps_per_epoch)
    ]


@given(SEEDS, EPOCHS, cuts())
def test_an_epoch_sees_every_sample_once_but_for_the_counted_tail(
    seed: int, epoch: int, cut: tuple[int, int, int, int]
) -> None:
    num_samples, batch, microbatch, world = cut
    order = epoch_order(seed, epoch, num_samples)
    seen = [i for step in steps_of(order, cut) for part in step for i in part]
    assert len(set(seen)) == len(seen)
    assert set(seen) <= set(range(num_samples))
    plan = BatchPlan(num_samples, batch, microbatch, 0, world)
    assert plan.num_dropped == num_samples - len(seen) < batch
    assert sorted([*seen, *order[len(seen) :].tolist()]) == list(range(num_samples))


@given(SEEDS, EPOCHS, cuts())
def test_a_step_has_the_same_microbatches_on_any_number_of_ranks(
    seed: int, epoch: int, cut: tuple[int, int, int, int]
) -> None:
    num_samples, batch, microbatch, _ = cut
    order = epoch_order(seed, epoch, num_samples)
    on_many = steps_of(order, cut)
    assert on_many == steps_of(order, (num_samples, batch, microbatch, 1))
    assert all(len(part) == microbatch for step in on_many for part in step)


@given(SEEDS, EPOCHS, st.integers(1, 500))
def test_the_order_is_a_function_of_seed_and_epoch(seed: int, epoch: int, count: int) -> None:
    order = epoch_order(seed, epoch, count)
    assert order.tolist() == epoch_order(seed, epoch, count).tolist()
    if count > 50:  # below, two permutations may be equal by chance
        assert order.tolist() != epoch_order(seed, epoch + 1, count).tolist()
        assert order.tolist() != epoch_order(seed + 1, epoch, count).tolist()


def test_the_order_is_what_it_was_when_the_format_was_fixed() -> None:
    """A run is resumed under another numpy, or years later: these values must not change."""
    assert epoch_order(0, 0, 10).tolist() == FIRST_ORDER
    assert epoch_order(1, 7, 10).tolist() == OTHER_ORDER
    assert derive_key(1, 2, 3) == KEY
    uniforms = sample_uniforms(3, 2, np.array([5, 6]), 2)
    assert uniforms.tolist() == UNIFORMS


def test_keys_are_those_of_the_published_splitmix64() -> None:
    """Its reference sequence for the seed 1234567, and its first word for the seed 0."""
    golden = 0x9E3779B97F4A7C15
    assert derive_key(1234567) == 6457827717110365317
    assert derive_key((1234567 + golden) % 2**64) == 3203168211198807973
    assert derive_key(0) == 0xE220A8397B1DCDAF


def test_the_dropped_tail_differs_between_epochs() -> None:
    tails = {tuple(epoch_order(0, epoch, 1000)[960:]) for epoch in range(20)}
    assert len(tails) == 20
    seen = np.unique(np.concatenate([epoch_order(0, e, 1000)[:960] for e in range(5)]))
    assert len(seen) == 1000  # nobody is left out for good


def test_positions_are_uniform_over_epochs() -> None:
    """Sample 0 lands in each tenth of the order about equally often (chi-squared, 9 degrees)."""
    counts = np.zeros(10)
    for epoch in range(1000):
        counts[int(np.flatnonzero(epoch_order(3, epoch, 100) == 0)[0]) // 10] += 1
    assert ((counts - 100) ** 2 / 100).sum() < 27.9  # exceeded by chance once in a thousand


@given(SEEDS, EPOCHS, st.lists(st.integers(0, 1_281_166), min_size=1, max_size=40, unique=True))
def test_uniforms_depend_on_the_sample_and_not_on_its_neighbours(
    seed: int, epoch: int, indices: list[int]
) -> None:
    rows = sample_uniforms(seed, epoch, np.array(indices), 41)
    assert ((rows >= 0) & (rows < 1)).all()
    alone = sample_uniforms(seed, epoch, np.array(indices[-1:]), 41)
    assert rows[-1].tolist() == alone[0].tolist()
    assert len({tuple(row) for row in rows.tolist()}) == len(indices)
    assert alone.tolist() != sample_uniforms(seed, epoch + 1, np.array(indices[-1:]), 41).tolist()


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    rows = sample_uniforms(0, 0, np.arange(20_000), 41)
    assert abs(rows.mean(axis=0) - 0.5).max() < 0.01
    assert abs(rows.var(axis=0) - 1 / 12).max() < 0.004
    correlation = np.corrcoef(rows, rowvar=False) - np.eye(41)
    assert abs(correlation).max() < 0.035  # 820 pairs, 5 sigma
    assert abs(np.corrcoef(rows[:-1, 0], rows[1:, 0])[0, 1]) < 0.035


@given(st.integers(0, 200), st.integers(1, 9), st.integers(1, 7))
def test_validation_is_dealt_out_once_and_evenly(count: int, batch: int, world: int) -> None:
    shares = [split_validation(count, batch, rank, world) for rank in range(world)]
    seen = sorted(int(i) for share in shares for part in share for i in part)
    assert seen == list(range(count))
    assert all(len(part) <= batch for share in shares for part in share)
    sizes = [sum(map(len, share)) for share in shares]
    assert max(sizes) - min(sizes) <= 1
