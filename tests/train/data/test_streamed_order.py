"""The streamed order: a permutation of (seed, epoch, units), mixed as well as a uniform one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataset.archive.units import EMPTY, MIXED
from tests.train.data.layouts import (
    Int64s,
    Mix,
    Stand,
    count_in_steps,
    imagenet_counts,
    make_stand,
    measure,
    shuffle_in_buffer,
)
from train.data.sampler import derive_key, epoch_order
from train.data.streamed_order import Layout, choose_window, sort_stably, streamed_order

SEEDS, EPOCHS = st.integers(0, 2**63), st.integers(0, 10_000)
GIB = 1 << 30
FIRST_ORDER = [5, 1, 4, 0, 15, 14, 7, 9, 8, 6, 12, 13, 2, 16, 17, 3, 10, 11, 18, 19]
OTHER_ORDER = [3, 16, 2, 17, 7, 12, 13, 6, 8, 9, 4, 19, 5, 18, 11, 10, 0, 15, 14, 1]
LARGE_DIGEST = "a89fa83bd978b52f640fdc5c4a8cc6d0df9142609c3bb8b27d626b4a27f2440a"


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Units of any class and of none, some without images."""
    group = draw(st.lists(st.integers(EMPTY, 4), min_size=1, max_size=20))
    unit = draw(st.lists(st.integers(0, len(group) - 1), min_size=1, max_size=200))
    return Layout(np.array(unit), np.array(group), draw(st.integers(1, 1 << 50)))


@given(SEEDS, EPOCHS, layouts(), st.integers(1, 250))
def test_the_order_is_one_permutation(seed: int, epoch: int, layout: Layout, window: int) -> None:
    order = streamed_order(seed, epoch, layout, window)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(len(layout)))


@given(SEEDS, EPOCHS, layouts(), st.integers(1, 199))
def test_the_order_is_that_of_the_formulas(
    seed: int, epoch: int, layout: Layout, window: int
) -> None:
    if window < len(layout):
        order = streamed_order(seed, epoch, layout, window)
        assert order.tolist() == order_by_fractions(seed, epoch, layout, window)


def order_by_fractions(seed: int, epoch: int, layout: Layout, window: int) -> list[int]:
    """The formulas as they are written down, one by one and without rounding."""
    unit, group, num = layout.unit.tolist(), layout.group.tolist(), len(layout)
    keys = [word(i, seed, epoch, 0x0DE1) for i in range(len(group))]
    turns = []
    for u, g in enumerate(group):
        mates = [v for v in range(len(group)) if group[v] == g]
        rank = sorted(mates, key=lambda v: keys[v]).index(u)
        turns.append((rank + Fraction(word(g, seed, epoch, 0x0DE2) >> 32, 1 << 32)) / len(mates))
    start, before = {}, 0
    for u in sorted(range(len(group)), key=lambda u: turns[u]):
        middle = before + Fraction(unit.count(u), 2)
        start[u] = min(max(middle - Fraction(window, 2), Fraction(0)), Fraction(num - window))
        before += unit.count(u)
    uniform = [Fraction(word(i, seed, epoch, 0x0DE3) >> 34, 1 << 30) for i in range(num)]
    return sorted(range(num), key=lambda i: start[unit[i]] + window * uniform[i])


def word(counter: int, *parts: int) -> int:
    """splitmix64 of a counter, in Python's own numbers."""
    value = counter * 0x9E3779B97F4A7C15 + derive_key(*parts) & (1 << 64) - 1
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ value >> shift) * factor & (1 << 64) - 1
    return value ^ value >> 31


@given(SEEDS, EPOCHS, layouts())
def test_a_window_of_the_whole_set_is_the_uniform_order(
    seed: int, epoch: int, layout: Layout
) -> None:
    uniform = epoch_order(seed, epoch, len(layout)).tolist()
    for window in (len(layout), len(layout) + 1):
        assert streamed_order(seed, epoch, layout, window).tolist() == uniform


def test_the_order_is_what_it_was_when_the_formulas_were_fixed() -> None:
    """A run is resumed under another numpy, or years later: these values must not change."""
    unit = np.repeat([9, 8, 7, 5, 5, 4, 3, 2, 1, 0], 2)
    layout = Layout(unit, np.array([0, 0, 0, MIXED, 1, 1, EMPTY, 2, 2, MIXED]), 20)
    assert streamed_order(0, 0, layout, 5).tolist() == FIRST_ORDER
    assert streamed_order(1, 7, layout, 5).tolist() == OTHER_ORDER
    number = np.arange(100_000)
    large = Layout(number // 18, np.arange(-(-100_000 // 18)) // 70, 1)
    order = streamed_order(3, 2, large, 4000)
    assert hashlib.sha256(order.astype("<i8").tobytes()).hexdigest() == LARGE_DIGEST


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(0, 40))
def test_equal_keys_keep_their_order(keys: list[int], max_ties: int) -> None:
    values = np.array(keys, np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.data.streamed_order.MAX_TIES", max_ties)
        order = sort_stably(values)
    assert order.tolist() == np.argsort(values, kind="stable").tolist()


def test_seed_and_epoch_change_the_order() -> None:
    layout = make_stand([200] * 20).layout
    orders = [streamed_order(s, e, layout, 500).tolist() for s, e in ((0, 0), (0, 1), (1, 0))]
    assert orders[0] != orders[1] != orders[2] != orders[0]


@pytest.mark.parametrize(
    ("counts", "image_bytes", "batch", "window"),
    [
        ([500_000] * 2, 100_000, 256, 4 * GIB // 100_000),  # 4 GiB of images
        ([500_000] * 2, 100_000, 8192, 16 * 8192),  # 16 batches
        ([500_000] * 2, 100_000, 65_536, 16 * GIB // 100_000),  # at most 16 GiB
        ([500] * 2, 100_000, 256, 1000),  # all
    ],
)
def test_the_window_is_that_of_the_rule(
    counts: list[int], image_bytes: int, batch: int, window: int
) -> None:
    label = np.repeat(np.arange(len(counts)), counts)
    unit = np.arange(len(label)) // 20
    layout = Layout(unit, label[::20], image_bytes * len(label))
    assert choose_window(layout, batch) == window


def test_the_window_has_two_units_of_each_class() -> None:
    """Of a class of one unit, that one; units without images count for nothing."""
    group = np.array([*np.repeat(np.arange(500), 100), 500, MIXED, MIXED, MIXED, EMPTY])
    unit = np.concatenate([np.repeat(np.arange(50_000), 20), [50_000] * 7, [50_001] * 4, [50_003]])
    layout = Layout(unit, group, len(unit) * 500_000)
    assert choose_window(layout, 32) == 500 * 40 + 7 + 4


@cache
def stand_for(name: str) -> Stand:
    """The sets of the proof; the large one is made once."""
    match name:
        case "imagenet":
            return make_stand(imagenet_counts())
        case "two classes":
            return make_stand([100_000, 100_000])
        case "unbalanced":
            return make_stand([180_000, 10_000, 6_000, 2_000, 2_000])
        case "classes of 20":
            return make_stand([20] * 10_000)
        case "random order":
            return make_stand([200] * 1000, in_random_order=True)
        case "large images":
            return make_stand([40] * 1000, mean_bytes=5 << 20)
    raise KeyError(name)


@pytest.fixture(scope="module", autouse=True)
def _forget_the_sets() -> Iterator[None]:
    yield
    stand_for.cache_clear()
    order_for.cache_clear()


@cache
def order_for(name: str, window: int) -> Int64s:
    stand = stand_for(name)
    return streamed_order(0, 0, stand.layout, window)


def mix_of(name: str, batch: int) -> Mix:
    stand = stand_for(name)
    window = choose_window(stand.layout, batch)
    assert batch <= window < len(stand)
    return measure(stand, order_for(name, window), batch, window)


@pytest.mark.parametrize(
    ("batch", "fewest_classes"),
    [
        (32, 24),
        (256, 195),
        pytest.param(2048, 820, marks=pytest.mark.soak),
        pytest.param(8192, 990, marks=pytest.mark.soak),
        (65_536, 1000),
    ],
)
def test_imagenet_is_mixed_as_by_a_uniform_order(batch: int, fewest_classes: int) -> None:
    mix = mix_of("imagenet", batch)
    assert mix.pairs <= 1.10
    assert mix.fewest_classes >= fewest_classes
    assert mix.mates <= 1.5
    assert mix.live <= 1.3


def test_imagenet_has_no_unit_of_two_classes() -> None:
    units = stand_for("imagenet").units
    assert units.group.min() >= 0
    assert len(units) == 70_268


def test_the_first_tenth_of_an_epoch_needs_a_ninth_of_imagenet() -> None:
    """The two numbers of docs/training.md."""
    stand = stand_for("imagenet")
    streamed = order_for("imagenet", choose_window(stand.layout, 256))
    shares = []
    for order in (streamed, epoch_order(0, 0, len(stand))):
        needed = np.unique(stand.layout.unit[order[: len(order) // 10]])
        shares.append(stand.units.num_bytes[needed].sum() / stand.units.num_bytes.sum())
    assert [round(100 * share) for share in shares] == [11, 83]


def test_a_uniform_order_measures_as_one() -> None:
    """The measure itself: a batch of 256 has 226 classes, and all of the data is live."""
    stand = stand_for("random order")
    mix = measure(stand, epoch_order(0, 0, len(stand)), 256, len(stand))
    assert 225 < mix.mean_classes < 227
    assert 0.98 < mix.pairs < 1.02 and 0.9 < mix.mates < 1.1 and 0.98 < mix.live <= 1


def test_file_order_through_a_buffer_is_seen_to_fail() -> None:
    """A buffer as large as the window: what loaders of tars usually do."""
    stand = stand_for("imagenet")
    window = choose_window(stand.layout, 256)
    mix = measure(stand, shuffle_in_buffer(stand.place, window), 256, window)
    assert mix.pairs > 10
    assert mix.fewest_classes < 100


@pytest.mark.parametrize("name", ["two classes", "unbalanced", "random order", "large images"])
def test_other_sets_are_mixed_as_well(name: str) -> None:
    mix = mix_of(name, 256)
    assert mix.pairs <= 1.10
    assert mix.mates <= 1.5
    assert mix.live <= 1.3


@pytest.mark.parametrize(
    ("name", "label"), [("two classes", 0), ("unbalanced", 0), ("unbalanced", 4)]
)
def test_the_share_of_a_class_scatters_no_more_than_in_a_uniform_order(
    name: str, label: int
) -> None:
    stand = stand_for(name)
    streamed = order_for(name, choose_window(stand.layout, 256))
    uniform = epoch_order(0, 0, len(stand))
    shares = [shares_of(stand, order, label) for order in (streamed, uniform)]
    assert shares[0].std() <= 1.15 * shares[1].std()


def shares_of(stand: Stand, order: Int64s, label: int, batch: int = 256) -> Int64s:
    """How many samples of a class each batch has."""
    num_steps = len(order) // batch
    counts: Int64s = (stand.label[order[: num_steps * batch]] == label).reshape(-1, batch).sum(1)
    return counts


def test_a_class_of_one_unit_meets_itself_only_as_its_window_allows() -> None:
    """10,000 classes of 20: two units of each are the whole set, and 16 GiB of it are 75 %."""
    stand = stand_for("classes of 20")
    mix = mix_of("classes of 20", 256)
    window = choose_window(stand.layout, 256)
    assert mix.pairs <= 1.05 * len(stand) / window < 1.45
    assert mix.fewest_classes >= 235
    assert mix.mates <= 1.5
    assert mix.live <= len(stand) / window


def test_a_set_smaller_than_its_window_is_shuffled_as_a_whole() -> None:
    stand = make_stand([20] * 2000, mean_bytes=10_000)
    assert choose_window(stand.layout, 256) == len(stand)
    order = streamed_order(5, 6, stand.layout, len(stand))
    assert order.tolist() == epoch_order(5, 6, len(stand)).tolist()


def test_classes_that_share_units_meet_themselves_only_as_the_window_allows() -> None:
    """Ten classes in each unit, which are in the unit as a whole: a window has few classes."""
    stand = make_stand([20] * 2000, mean_bytes=10_000)
    assert set(stand.units.group[:-1].tolist()) == {MIXED}
    window = 4000
    mix = measure(stand, streamed_order(0, 0, stand.layout, window), 256, window)
    assert mix.pairs <= 1.05 * len(stand) / window
    assert mix.mates <= 1.5


def test_the_first_and_last_batches_are_mixed_too() -> None:
    """The clip: without it they fall to 150 classes."""
    stand = stand_for("imagenet")
    order = order_for("imagenet", choose_window(stand.layout, 256))
    step = np.repeat(np.arange(10), 256)
    for part in (order[:2560], order[-2560:]):
        classes, _ = count_in_steps(step, stand.label[part])
        assert classes.min() >= 195
