"""A cache that holds a part of a tar: by need, within its limit, and each failure as one line."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dataset.errors import DataError, PassingError, UserError
from dataset.stream.spec import NEVER
from dataset.stream.unit_cache import UnitCache
from dataset.stream.unit_fetch import UnitFetch
from dataset.stream.unit_plan import NextUses
from dataset.stream.unit_request import UnitRequest
from tests.dataset.small_server import Handler
from tests.dataset.stream.bounded_streams import CONTENT, Bounded, make_bounded
from tests.dataset.stream.streams import serving_counted, wait_until
from tests.dataset.stream.url_index import first_byte
from tests.dataset.tars import TRAIN
from train.data.network_meter import NetworkMeter
from train.data.unit_source import UnitSource


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Bounded]:
    made = make_bounded(tmp_path / "cache")
    yield made
    made.stop()


def count(cache: Bounded) -> int:
    return len(cache.map.here)


def open_source(cache: Bounded) -> UnitSource:
    return UnitSource(cache.index, cache.map, cache.units, NetworkMeter(cache.folder / "meter"))


def image_of(cache: Bounded, sample: int) -> bytes:
    offset, size = int(cache.index.offset[sample]), int(cache.index.size[sample])
    return CONTENT[offset : offset + size]


def test_units_come_in_the_order_of_need_as_far_as_the_limit_allows(cache: Bounded) -> None:
    steps = np.random.default_rng(0).permutation(count(cache))
    in_order = np.argsort(steps)
    cache.plan(steps)
    limit = int(cache.num_bytes[in_order[:5]].sum())
    with serving_counted(CONTENT, name=TRAIN) as (url, seen, _):
        cache.start(url, limit, connections=1)
        cache.await_units(*in_order[:5])
        ranges = [request["range"][6:] for request in seen if request.get("range")]
        begins = [int(text.split("-")[0]) for text in ranges if text != "0-0"]
        assert begins == cache.map.bounds[in_order[:5]].tolist()
        for step in range(count(cache)):
            cache.await_units(in_order[step])
            assert cache.file(in_order[step]).read_bytes() == cache.bytes_of(in_order[step])
            assert cache.measure() <= limit
            cache.step(step + 1)
    wait_until(lambda: cache.map.tally.fetched >= len(CONTENT))
    assert cache.map.tally.refetched == 0


def test_an_index_with_labels_of_a_file_leaves_no_class_to_prove(tmp_path: Path) -> None:
    """No header tells a class there; nor on one of several nodes."""
    cache = make_bounded(tmp_path / "cache")
    index = replace(cache.index, labels_from="LOC_val_solution.csv")
    source = UnitSource(index, cache.map, cache.units, NetworkMeter(cache.folder / "meter"))
    assert source.list_unproven() == []
    source.prove_only([])
    assert source.list_unproven() == []


def test_what_fits_is_kept_and_the_rest_is_fetched_again(cache: Bounded) -> None:
    """Unit u is used at step u of each of three epochs; two units are in use at most."""
    num, sizes = count(cache), cache.num_bytes
    keep, working = int(sizes[:8].sum()), int(2 * sizes.max())
    for epoch in range(3):
        cache.plan(np.arange(num) + epoch * num)
    with serving_counted(CONTENT, name=TRAIN) as (url, _, _):
        cache.start(url, keep + working, keep)
        fetched = [0]
        for step in range(3 * num):
            cache.await_units(step % num)
            cache.step(step + 1)
            if (step + 1) % num == 0:
                fetched.append(cache.map.tally.fetched)
            assert cache.measure() <= keep + working
    for begin, end in itertools.pairwise(fetched[1:]):
        # What was already on its way, or left of the working space, may count for either epoch.
        assert abs(end - begin - (sizes.sum() - keep)) <= 2 * working + keep // 4
    assert cache.map.tally.refetched > 0 == cache.map.tally.replaced


@pytest.mark.parametrize("damage", ["truncated", "flipped", "removed", "touched"])
def test_a_file_that_is_changed_under_the_reader_is_fetched_again(
    cache: Bounded, damage: str
) -> None:
    cache.plan(np.zeros(count(cache)))
    source = open_source(cache)
    sample, size = 5, len(CONTENT)
    unit = cache.map.find(int(cache.index.offset[sample]), int(cache.index.offset[sample]) + 1)[0]
    with serving_counted(CONTENT, name=TRAIN) as (url, _, _):
        cache.start(url, size)
        assert source.read(sample) == image_of(cache, sample)
        wait_until(lambda: bool(cache.map.here.all()) and cache.map.tally.fetched >= size)
        before = cache.map.tally.fetched
        file = cache.file(unit)
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        if damage == "truncated":
            os.truncate(file, len(data) - 512)
        elif damage == "flipped":
            file.write_bytes(data)
        elif damage == "removed":
            file.unlink()
        else:
            os.utime(file, ns=(1, 1))
        assert source.read(sample) == image_of(cache, sample)
        is_right = damage == "touched"
        expected = 0 if is_right else int(cache.num_bytes[unit])
        wait_until(lambda: cache.map.tally.replaced == expected)
        assert cache.map.tally.fetched == before + expected
        assert file.read_bytes() == cache.bytes_of(unit)


def test_a_unit_that_no_plan_names_comes_when_a_reader_waits_for_it(cache: Bounded) -> None:
    """As when a bad image is replaced by one of another unit; others make room for it."""
    first = np.full(count(cache), NEVER)
    first[:4] = [0, 1, 2, 3]
    cache.plan(first)
    source = open_source(cache)
    limit = int(cache.num_bytes[:4].sum())
    with serving_counted(CONTENT, name=TRAIN) as (url, _, _):
        cache.start(url, limit)
        cache.await_units(0, 1, 2)
        last = len(source) - 1
        assert source.read(last) == image_of(cache, last)
        assert cache.measure() <= limit


def test_what_an_earlier_start_left_is_verified_and_used(cache: Bounded) -> None:
    cache.plan(np.arange(count(cache)))
    with serving_counted(CONTENT, name=TRAIN) as (url, _, _):
        cache.start(url, len(CONTENT))
        cache.await_units(*range(8))
        cache.stop()
    flipped = bytearray(cache.file(2).read_bytes())
    flipped[7] ^= 1
    cache.file(2).write_bytes(flipped)
    cache.file(3).write_bytes(b"short")
    (cache.units / "0000004.part").write_bytes(b"left by a kill")
    cache.map.path.unlink()  # a new run has a new map
    again = Bounded(cache.folder, cache.index, cache.place)
    again.plan(np.where(np.arange(count(cache)) < 8, np.arange(count(cache)), NEVER))
    with serving_counted(CONTENT, name=TRAIN) as (url, _, _):
        again.start(url, len(CONTENT))
        again.await_units(*range(8))
        again.stop()
    tally, sizes = again.map.tally, again.num_bytes
    assert tally.fetched == sizes[2] + sizes[3]
    assert tally.resumed == sizes[[0, 1, 4, 5, 6, 7]].sum()
    assert [again.file(unit).read_bytes() for unit in range(8)] == [
        again.bytes_of(unit) for unit in range(8)
    ]


def test_only_a_silent_or_very_slow_request_gets_a_rival() -> None:
    request = UnitRequest(0, None, now=100.0)
    fetch: Any = SimpleNamespace(_out={request}, _map=SimpleNamespace(asked=np.ones(1)))
    choose = partial(UnitFetch._choose_hedge, fetch)
    assert choose(100.9) is None
    assert choose(101.0) is request  # nothing has come
    request.last_data = 101.5
    assert choose(102.4) is None  # on a busy link
    assert choose(102.5) is request
    request.last_data = 103.9
    assert choose(104.0) is request  # a trickle
    fetch._map.asked[0] = 0
    assert choose(200.0) is None  # nobody waits for it


def test_wrong_bytes_are_asked_for_again_and_wrong_everywhere_is_3(cache: Bounded) -> None:
    """The first answer is wrong, and so is every one with the last unit."""
    wrong, asked = bytes(len(CONTENT)), 0
    last = int(cache.map.bounds[-2])

    def misbehave(handler: Handler) -> bool:
        nonlocal asked
        if handler.headers.get("Range", "") != "bytes=0-0":
            asked += 1
            handler.content = wrong if asked == 1 or first_byte(handler) == last else CONTENT
        return False

    cache.plan(np.arange(count(cache)))
    with serving_counted(CONTENT, misbehave, name=TRAIN) as (url, _, _):
        cache.start(url, len(CONTENT), connections=1)
        error = cache.await_error()
    assert cache.map.here[0] and (cache.map.tally.twice or {})["wrong"] > cache.num_bytes[0]
    assert isinstance(error, DataError) and "are wrong by the index at every server" in str(error)


def test_another_class_than_the_index_says_is_3(tmp_path: Path) -> None:
    cache = make_bounded(tmp_path / "cache")
    with np.load(cache.place) as file:
        arrays = {name: file[name] for name in file.files}
    arrays["classes"] = np.roll(arrays["classes"].reshape(4, -1), 1, axis=0).ravel()
    with open(cache.place, "wb") as out:
        np.savez(out, **arrays)
    cache.plan(np.arange(count(cache)))
    with serving_counted(CONTENT, name=TRAIN) as (url, _, _):
        cache.start(url, len(CONTENT))
        error = cache.await_error()
    assert isinstance(error, DataError) and "is wrong" in str(error)


def test_a_source_without_ranges_and_one_that_is_down(cache: Bounded, tmp_path: Path) -> None:
    def ignore_range(handler: Handler) -> bool:
        del handler.headers["Range"]
        return False

    cache.plan(np.arange(count(cache)))
    with serving_counted(CONTENT, ignore_range, name=TRAIN) as (url, _, _):
        cache.start(url, len(CONTENT))
        assert isinstance(cache.await_error(), UserError)

    def refuse(handler: Handler) -> bool:
        if handler.headers.get("Range", "") == "bytes=0-0":
            return False
        handler.send_error(503)
        return True

    other = make_bounded(tmp_path / "other")
    other.plan(np.arange(count(other)))
    with serving_counted(CONTENT, refuse, name=TRAIN) as (url, _, _):
        other.start(url, len(CONTENT), give_up_s=1.0)
        assert isinstance(other.await_error(), PassingError)


def test_a_limit_below_what_one_step_uses_is_2(cache: Bounded) -> None:
    cache.plan(np.zeros(count(cache)))
    cache.map.asked[:] = 1
    with serving_counted(CONTENT, name=TRAIN) as (url, _, _):
        cache.start(url, int(cache.num_bytes[:3].sum()))
        error = cache.await_error()
    assert isinstance(error, UserError) and "give a larger --cache-limit" in str(error)


def test_a_full_disk_lowers_the_limit(cache: Bounded, monkeypatch: pytest.MonkeyPatch) -> None:
    num, write = count(cache), UnitCache.write
    room = int(cache.num_bytes[:6].sum())

    def write_or_fail(self: UnitCache, unit: int, data: bytes | bytearray) -> int:
        if cache.measure() + len(data) > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, unit, data)

    monkeypatch.setattr(UnitCache, "write", write_or_fail)
    cache.plan(np.arange(num))
    with serving_counted(CONTENT, name=TRAIN) as (url, _, _):
        cache.start(url, len(CONTENT), connections=1)
        for step in range(num):
            cache.await_units(step)
            cache.step(step + 1)
    assert cache.fetch is not None and cache.fetch.cache.limit <= room


def test_a_full_disk_leaves_room_for_what_comes_next(tmp_path: Path) -> None:
    """All was to be kept; now what the training needs at a time has to come out of that."""
    cache = make_bounded(tmp_path / "cache")
    num, sizes = count(cache), cache.num_bytes
    for epoch in range(2):
        cache.plan(np.arange(num) + epoch * num)
    uses = NextUses(cache.folder, num)
    limit, keep = int(sizes.sum() + 2 * sizes.max()), int(sizes.sum())
    held = UnitCache(cache.units, cache.map, uses, limit, keep)
    uses.follow(0)
    for unit in range(num - 1):
        assert held.take_place(unit)
        cache.map.mark_written(unit, held.write(unit, cache.bytes_of(unit)))
    uses.follow(num - 1)
    held.settle()
    held.lower_limit(OSError(errno.ENOSPC, "No space left on device"))
    assert held.limit == held.used_bytes == sizes[:-1].sum()
    assert held.take_place(num - 1)  # nobody waits for it yet
    assert cache.map.here[0] and not cache.map.here[num - 2]  # what is used last gave way
    uses.follow(num)
    held.settle()
    assert cache.map.here[: num - 3].all()
