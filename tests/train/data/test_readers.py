"""Threads that wait for a slow disk are more than those that decode, and memory stays bounded."""

from __future__ import annotations

import pickle
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataset.errors import DataError
from tests.train.data.small_batches import items_of, open_images
from train.data.batches import Draft, Images, Item
from train.data.loader import (
    BATCHES_AHEAD,
    MAX_READERS,
    count_ahead,
    count_readers,
    load_batches,
)
from train.data.readers import Pace, Reads, choose_limit
from train.data.sampler import BatchPlan

WAIT_S = 60.0


def open_in_threads(images: Path) -> Images:
    """The images, for threads also where the kernel is not built."""
    opened = open_images(images)
    opened.decoder.releases_gil = True
    return opened


class MeetingSource:
    """A source whose first reads return only when so many of them are under way at once."""

    def __init__(self, source: Any, num_reads: int) -> None:
        self._source = source
        self._left = num_reads
        self._lock = threading.Lock()
        self._barrier = threading.Barrier(num_reads)

    def __len__(self) -> int:
        return len(self._source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def read(self, index: int) -> bytes:
        with self._lock:
            self._left -= 1
            waits = self._left >= 0
        if waits:
            self._barrier.wait(WAIT_S)
        data: bytes = self._source.read(index)
        return data


class CountingDecoder:
    """Notes how many images are decoded at once; each waits a moment for others to join it."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self._lock = threading.Lock()
        self._now = self.most = 0
        self.another = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def train(self, *args: Any) -> None:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        self.another.wait(0.001)
        self._decoder.train(*args)
        with self._lock:
            self._now -= 1


@pytest.mark.parametrize("num_decoders", [1, 2])
def test_many_reads_wait_at_once_and_few_images_are_decoded_at_once(
    images: Path, num_decoders: int
) -> None:
    opened = open_in_threads(images)
    items = items_of(opened)
    expected = list(load_batches(opened, items, 0))
    opened = open_in_threads(images)
    opened.train = MeetingSource(opened.train, count_readers(num_decoders))
    counting = CountingDecoder(opened.decoder)
    opened.decoder = counting  # type: ignore[assignment]
    found = list(load_batches(opened, items, num_decoders))
    assert 1 <= counting.most <= num_decoders
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert np.array_equal(ours.images, theirs.images)
        assert np.array_equal(ours.labels, theirs.labels)


def test_readers_are_several_for_each_decoder_and_bounded() -> None:
    assert [count_readers(n) for n in (1, 2, 4, 16, 100)] == [8, 16, 32, MAX_READERS, 100]


@pytest.mark.parametrize(
    ("reads_per_decode", "expected"), [(0.0, 2), (0.05, 3), (1.0, 5), (3.3, 11), (50.0, 16)]
)
def test_threads_follow_the_time_of_a_read(reads_per_decode: float, expected: int) -> None:
    assert choose_limit(2, 16, reads_per_decode) == expected


def test_all_threads_read_until_reads_are_known_to_be_quick_and_again_when_they_are_slow() -> None:
    pace = Pace(2, 16)
    assert pace.limit == 16
    pace._learn(read_s=0.0, decode_s=0.001)
    assert pace.limit == 2
    for _ in range(100):
        pace._learn(read_s=0.010, decode_s=0.001)
    assert pace.limit == 16


@pytest.mark.parametrize(
    ("microbatch", "image_size", "expected"),
    [
        (256, 224, BATCHES_AHEAD),  # 37 MiB each
        (1024, 224, 3),  # 147 MiB each: no more than 512 MiB, but for three
        (4096, 224, 3),
        (8, 224, 65),  # small ones, so that no thread is without work
    ],
)
def test_what_is_ahead_is_bounded_in_bytes(
    images: Path, microbatch: int, image_size: int, expected: int
) -> None:
    opened = open_images(images)
    opened.plan = BatchPlan(1_000_000, 8192, microbatch, 0, 1)
    opened.image_size = image_size
    assert count_ahead(opened, MAX_READERS) == expected


def test_images_can_be_sent_to_a_worker_after_threads_have_used_them(images: Path) -> None:
    opened = open_in_threads(images)
    list(load_batches(opened, items_of(opened)[:1], 2))
    assert isinstance(pickle.loads(pickle.dumps(opened)), Images)


def test_an_error_of_a_later_batch_comes_after_the_batches_before_it(images: Path) -> None:
    """The loader looks several batches ahead: what it meets there must not hide good ones."""
    opened = open_in_threads(images)
    items = items_of(opened)
    plain = opened.draft

    def draft(item: Item) -> Draft:
        if item == items[3]:
            raise DataError("the tar was changed")
        return plain(item)

    opened.draft = draft  # type: ignore[method-assign]
    batches = load_batches(opened, items, 2)
    assert [len(next(batches).labels) for _ in range(3)] == [2, 2, 2]
    with pytest.raises(DataError, match="the tar was changed"):
        next(batches)


class EndingRows(np.ndarray[Any, Any]):
    """Rows of the readers of which all reads end as soon as somebody picks some out."""

    shared: Any

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, np.ndarray):
            self.shared[:, 0] = 0.0
        return super().__getitem__(key)

    def __array_finalize__(self, other: Any) -> None:
        self.shared = getattr(other, "shared", None)


def test_a_read_that_ends_while_it_is_looked_at_is_not_taken_for_an_old_one() -> None:
    """Its beginning is 0 then: counted from there it would have run since the machine started."""
    reads = Reads()
    shared = reads._rows
    shared[3] = time.monotonic(), False, 7
    rows = shared.view(EndingRows)
    rows.shared = shared
    reads._rows = rows
    found = reads.slowest()
    assert found is None or (found.seconds < WAIT_S and found.sample == 7)
    assert reads.slowest() is None
