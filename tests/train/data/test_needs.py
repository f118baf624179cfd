"""When a run needs each MiB: compared with a walk through its steps, sample by sample."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dataset.archive.units import cut_units
from dataset.stream.spec import NEVER, spread_needs
from dataset.transfer.journal import CHUNK
from tests.train.data.arriving import Arriving, write_padded
from tests.train.data.layouts import make_layout
from train.data.needs import HEADERS, count_ahead, count_first_steps, find_needs, find_uses
from train.data.sample_order import SampleOrder, order_along
from train.data.streamed_order import Layout
from train.data.tar_layout import find_layout

BATCH, STEPS = 8, 5


@pytest.fixture(scope="module")
def tar(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Arriving:
    folder = tmp_path_factory.mktemp("needs")
    tars = write_padded(images, folder / "tars")
    return Arriving(tars / "ILSVRC2012_img_train.tar", folder / "data")


def walk(tar: Arriving, order: SampleOrder, step: int, last_step: int) -> list[int]:
    """The need of each chunk, by asking for every step where its samples lie."""
    needs = [NEVER] * len(tar.map.here)

    def use(begin: int, end: int, at: int) -> None:
        for chunk in range(begin // CHUNK, (end - 1) // CHUNK + 1):
            needs[chunk] = min(needs[chunk], at)

    for later in range(step, (step // STEPS + 2) * STEPS):
        epoch, in_epoch = divmod(later, STEPS)
        samples = order.permute(3, epoch, 42)[in_epoch * BATCH :][:BATCH]
        for sample in samples.tolist():
            offset, size = int(tar.index.offset[sample]), int(tar.index.size[sample])
            use(max(0, offset - 5 * 512), offset + size, later - step)
    for label in range(7):
        first = int(tar.index.offset[tar.index.label == label].min())
        use(max(0, first - 17 * 512), first, last_step - step)
    return needs


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(("step", "last_step"), [(0, 9), (3, 9), (5, 6), (14, 14), (2, 2)])
@pytest.mark.usefixtures("small_units")
def test_needs_are_those_of_a_walk_through_the_steps(
    tar: Arriving, is_streamed: bool, step: int, last_step: int
) -> None:
    layout, units = find_layout(tar.source, tar.path.parent, None)
    order = order_along(layout, units, BATCH, None) if is_streamed else SampleOrder()
    assert not is_streamed or order.window < 42
    needs = find_needs(tar.source, order, 3, BATCH, step, last_step)
    assert needs.dtype == np.int32 and needs.tolist() == walk(tar, order, step, last_step)


def test_a_sample_that_two_epochs_drop_is_never_needed() -> None:
    """17 samples in batches of 8: one of each epoch is left over."""
    for seed in range(200):
        uses = find_uses(SampleOrder(), seed, 17, 8, 0)
        dropped = {int(SampleOrder().permute(seed, epoch, 17)[16]) for epoch in (0, 1)}
        assert set(np.flatnonzero(uses == NEVER)) == (dropped if len(dropped) == 1 else set())


def test_chunks_get_the_least_of_the_steps_that_use_them() -> None:
    begin, end = (
        np.array([0, CHUNK - 1, 3 * CHUNK]),
        np.array([CHUNK, 2 * CHUNK + 1, 3 * CHUNK + 1]),
    )
    needs = spread_needs(begin, end, np.array([7, 5, 2]), 5 * CHUNK)
    assert needs.tolist() == [5, 5, 5, 2, NEVER]


def test_the_steps_ahead_end_with_the_first_missing_chunk(images: Path, tmp_path: Path) -> None:
    tars = write_padded(images, tmp_path / "tars")
    tar = Arriving(tars / "ILSVRC2012_img_train.tar", tmp_path / "data")
    needs = np.array([4, 0, NEVER, 2, 2, 9, NEVER], np.int32)
    found = []
    for chunk in (1, 3, 4, 0, 5, 2):
        found.append(count_ahead(needs, tar.map))
        tar.bring(chunk)
    assert found == [0, 2, 2, 4, 9, NEVER]
    tar.bring_all()
    assert count_ahead(needs, tar.map) == NEVER


def test_validation_follows_the_first_window_or_the_end_of_the_epoch() -> None:
    layout = Layout(np.arange(1000), np.zeros(1000, np.int64), 1)
    streamed = SampleOrder(layout, window=100)
    assert count_first_steps(streamed, 1000, 8, 0) == 13
    assert count_first_steps(streamed, 1000, 8, 120) == 5
    assert count_first_steps(SampleOrder(), 1000, 8, 0) == 125


def test_the_first_step_needs_less_than_half_of_the_units_it_touches() -> None:
    """On 200 classes of 1,300 images of ImageNet's mean size, in batches of 256."""
    num, size = 200 * 1300, 115_200
    label = np.repeat(np.arange(200), 1300)
    offset = np.arange(num, dtype=np.int64) * (size + 512) + 512
    tar_size = num * (size + 512)
    units = cut_units(offset, np.full(num, size), label, tar_size)
    order = order_along(make_layout(units), units.digest, 256, None)
    uses = find_uses(order, 0, num, 256, 0)
    own = spread_needs(offset - HEADERS, offset + size, uses, tar_size)
    of_units = np.full(len(units), NEVER, np.int64)
    np.minimum.at(of_units, units.unit, uses)
    whole = spread_needs(units.bounds[:-1], units.bounds[1:], of_units, tar_size)
    assert 256 <= 2 * (own == 0).sum() < (whole == 0).sum()
