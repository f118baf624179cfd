"""Lanes: who has which samples, what fills which slots, and how well ImageNet's size is mixed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataset.archive.units import EMPTY, MIXED
from tests.train.data.layouts import (
    Int64s,
    Stand,
    count_in_steps,
    find_live_bytes,
    imagenet_counts,
    make_stand,
    measure,
    pair_share,
)
from train.data.lanes import deal_samples
from train.data.sampler import epoch_order
from train.data.streamed_order import Layout, choose_window, streamed_order

SEEDS, EPOCHS, LANES = st.integers(0, 2**63), st.integers(0, 10_000), st.integers(2, 8)
GIB = 1 << 30
FIRST_DEAL = [[4, 5, 6, 7, 8, 9, 12, 13, 18, 19], [0, 1, 2, 3, 10, 11, 14, 15, 16, 17]]
FIRST_ORDER = [8, 7, 16, 17, 6, 9, 1, 3, 19, 18, 0, 2, 12, 13, 14, 15, 4, 5, 11, 10]
LARGE_DIGEST = "4cfe6e700fac61048471dab186f39eadaf977e416697a91b05df8043a8f364ff"


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Units of any class and of none, some without images."""
    group = draw(st.lists(st.integers(EMPTY, 4), min_size=1, max_size=40))
    unit = draw(st.lists(st.integers(0, len(group) - 1), min_size=1, max_size=200))
    return Layout(np.array(unit), np.array(group), draw(st.integers(1, 1 << 50)))


def slots_of(order: Int64s, lanes: int, batch: int) -> list[Int64s]:
    """What each lane gives to each step of an epoch."""
    num_steps = len(order) // batch
    cut = order[: num_steps * batch].reshape(num_steps, lanes, batch // lanes)
    return [cut[:, lane] for lane in range(lanes)]


# --- the rules --------------------------------------------------------------------------------


@given(SEEDS, EPOCHS, layouts(), LANES, st.integers(1, 8), st.integers(1, 250))
def test_every_sample_comes_once_and_from_its_own_lane(
    seed: int, epoch: int, layout: Layout, lanes: int, slots: int, window: int
) -> None:
    order = streamed_order(seed, epoch, layout, window, lanes, lanes * slots)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(len(layout)))
    dealt = deal_samples(seed, epoch, layout.unit, layout.group, lanes)
    for samples, used in zip(dealt, slots_of(order, lanes, lanes * slots), strict=True):
        assert set(used.ravel().tolist()) <= set(samples.tolist())


@given(SEEDS, EPOCHS, layouts(), LANES)
def test_lanes_differ_by_one_image_and_share_a_unit_only_at_a_border(
    seed: int, epoch: int, layout: Layout, lanes: int
) -> None:
    """So a lane has the images for all its slots, whatever the batch is."""
    dealt = deal_samples(seed, epoch, layout.unit, layout.group, lanes)
    sizes = [len(samples) for samples in dealt]
    assert sum(sizes) == len(layout) and max(sizes) - min(sizes) <= 1
    units = [set(layout.unit[samples].tolist()) for samples in dealt]
    assert sum(map(len, units)) <= len(set(layout.unit.tolist())) + lanes - 1


@given(SEEDS, EPOCHS, st.integers(1, 5), st.integers(2, 6))
def test_large_classes_are_dealt_for_the_run_and_evenly(
    seed: int, epoch: int, num_classes: int, lanes: int
) -> None:
    per_class = 3 * lanes
    group = np.repeat(np.arange(num_classes), per_class)
    unit = np.repeat(np.arange(len(group)), 4)
    dealt = deal_samples(seed, epoch, unit, group, lanes)
    again = deal_samples(seed, epoch + 1, unit, group, lanes)
    for samples, later in zip(dealt, again, strict=True):
        assert samples.tolist() == later.tolist()
        assert np.bincount(group[unit[samples]]).tolist() == [4 * 3] * num_classes


def test_classes_with_fewer_units_than_lanes_are_dealt_anew_each_epoch() -> None:
    """The one unit of class 1 is in every lane at some time; class 0 stays, but for its borders."""
    group = np.append(np.zeros(80, np.int64), 1)
    unit = np.repeat(np.arange(81), 10)
    homes, large = set(), []
    for epoch in range(40):
        dealt = deal_samples(7, epoch, unit, group, 4)
        homes |= {lane for lane, samples in enumerate(dealt) if 80 in unit[samples]}
        large.append([set(unit[samples].tolist()) - {80} for samples in dealt])
    assert homes == {0, 1, 2, 3}
    moved = [len(a ^ b) for one in large for a, b in zip(one, large[0], strict=True)]
    assert max(moved) <= 3


def test_the_tail_differs_every_epoch_in_every_lane() -> None:
    stand = make_stand([100] * 20)
    lanes, batch = 4, 24
    window = 100
    tails = []
    for epoch in range(5):
        order = streamed_order(3, epoch, stand.layout, window, lanes, batch)
        used = np.concatenate([part.ravel() for part in slots_of(order, lanes, batch)])
        tail = set(range(len(stand))) - set(used.tolist())
        assert len(tail) == len(stand) % batch
        tails.append(tail)
    assert all(one != other for one, other in pairwise(tails))


def test_lanes_are_what_they_were_when_the_rule_was_fixed() -> None:
    """A run is resumed under another numpy, or years later: these values must not change."""
    group = np.array([0, 0, 0, MIXED, 1, 1, EMPTY, 2, 2, MIXED])
    layout = Layout(np.repeat([9, 8, 7, 5, 5, 4, 3, 2, 1, 0], 2), group, 20)
    dealt = deal_samples(1, 0, layout.unit, group, 2)
    assert [samples.tolist() for samples in dealt] == FIRST_DEAL
    assert streamed_order(1, 0, layout, 3, 2, 4).tolist() == FIRST_ORDER
    large = Layout(np.arange(100_000) // 18, np.arange(-(-100_000 // 18)) // 70, 1)
    order = streamed_order(3, 2, large, 4000, 8, 256)
    assert hashlib.sha256(order.astype("<i8").tobytes()).hexdigest() == LARGE_DIGEST


@given(SEEDS, EPOCHS, layouts(), LANES)
def test_a_window_of_the_whole_lane_shuffles_it_as_the_uniform_order_would(
    seed: int, epoch: int, layout: Layout, lanes: int
) -> None:
    order = streamed_order(seed, epoch, layout, len(layout), lanes, lanes)
    uniform = epoch_order(seed, epoch, len(layout)).tolist()
    dealt = deal_samples(seed, epoch, layout.unit, layout.group, lanes)
    for samples, used in zip(dealt, slots_of(order, lanes, lanes), strict=True):
        mine = set(samples.tolist())
        assert used.ravel().tolist() == [s for s in uniform if s in mine][: used.size]


@pytest.mark.parametrize(
    ("counts", "image_bytes", "batch", "window"),
    [
        ([500_000] * 2, 100_000, 256, 4 * GIB // 100_000),  # 4 GiB of images, as of one lane
        ([500_000] * 2, 100_000, 32_768, 16 * 32_768 // 4),  # 16 of its shares of a batch
        ([5000] * 2, 100_000, 256, 2500),  # all of it
    ],
)
def test_the_window_of_a_lane_is_that_of_the_rule(
    counts: list[int], image_bytes: int, batch: int, window: int
) -> None:
    label = np.repeat(np.arange(len(counts)), counts)
    layout = Layout(np.arange(len(label)) // 20, label[::20], image_bytes * len(label))
    assert choose_window(layout, batch, 4) == window


# --- at the size of ImageNet ------------------------------------------------------------------


@cache
def imagenet() -> Stand:
    return make_stand(imagenet_counts())


@cache
def order_of(lanes: int, batch: int, epoch: int = 0) -> Int64s:
    stand = imagenet()
    return streamed_order(
        0, epoch, stand.layout, choose_window(stand.layout, batch, lanes), lanes, batch
    )


@pytest.fixture(scope="module", autouse=True)
def _forget_the_set() -> Iterator[None]:
    yield
    order_of.cache_clear()
    imagenet.cache_clear()


def bytes_of(stand: Stand, samples: Int64s) -> float:
    """The share of the tar that some samples need."""
    needed = np.unique(stand.layout.unit[samples])
    return float(stand.units.num_bytes[needed].sum() / stand.units.num_bytes.sum())


def test_each_of_8_nodes_fetches_an_eighth_of_imagenet_in_all_epochs() -> None:
    stand, shares = imagenet(), []
    epochs = [slots_of(order_of(8, 256, epoch), 8, 256) for epoch in (0, 1)]
    for lane in range(8):
        first, second = (parts[lane].ravel() for parts in epochs)
        assert 0.124 < bytes_of(stand, first) < 0.128
        shares.append(bytes_of(stand, np.concatenate([first, second])))
    assert max(shares) < 0.128
    assert 1 <= sum(shares) < 1.001


def test_without_lanes_each_of_8_nodes_would_fetch_nearly_all() -> None:
    stand = imagenet()
    first = slots_of(order_of(1, 256), 8, 256)[0]
    assert bytes_of(stand, first.ravel()) > 0.85


@pytest.mark.parametrize(
    ("lanes", "batch"),
    [
        pytest.param(2, 256, marks=pytest.mark.soak),
        (3, 255),
        pytest.param(8, 256, marks=pytest.mark.soak),
        (8, 2048),
    ],
)
def test_a_batch_of_all_lanes_is_mixed_as_by_one(lanes: int, batch: int) -> None:
    stand = imagenet()
    window = choose_window(stand.layout, batch, lanes)
    assert batch < lanes * window < len(stand)
    mix = measure(stand, order_of(lanes, batch), batch, lanes * window)
    assert mix.pairs <= 1.10
    assert mix.fewest_classes >= (195 if batch < 2048 else 820)
    assert mix.mates <= 1.5
    assert mix.live <= 1.3


@pytest.mark.parametrize(("lanes", "batch"), [(2, 256), (8, 2048)])
def test_what_one_lane_gives_to_a_batch_of_256_is_mixed_as_well(lanes: int, batch: int) -> None:
    """By the bounds of an order without lanes: so batch norm on each node sees all classes."""
    stand = imagenet()
    window = choose_window(stand.layout, batch, lanes)
    for part in slots_of(order_of(lanes, batch), lanes, batch):
        step = np.repeat(np.arange(len(part)), batch // lanes)
        classes, pairs = count_in_steps(step, stand.label[part.ravel()])
        by_chance = len(step) * (batch // lanes - 1) * pair_share(stand.label)
        assert pairs <= 1.10 * by_chance
        assert classes.min() >= {128: 104, 256: 195}[batch // lanes]
        live = find_live_bytes(stand, part.ravel())
        assert live <= 1.3 * window * stand.layout.num_bytes / len(stand)
