"""The order of a run: its layout from a tar or a folder, on any ranks and workers; bad images.

Units are small here (tests/train/hooks.py), so that 42 images have many.
"""

from __future__ import annotations

import os
import pickle
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from dataset.archive.index import build_index
from dataset.errors import DataError, UserError
from tests.train.data.small_batches import (
    BATCH,
    NUM_TRAIN,
    SEED,
    SIZE,
    items_of,
    load,
    open_images,
    open_streamed,
    spoil,
)
from train.data.batches import Item
from train.data.decode import UNIFORMS_PER_SAMPLE, decode_train
from train.data.loader import load_batches
from train.data.sample_order import (
    STREAMED,
    UNIFORM,
    SampleOrder,
    name_order,
    order_along,
    order_as_before,
)
from train.data.sampler import epoch_order, sample_uniforms
from train.data.sources import TarSource
from train.data.streamed_order import Layout, streamed_order
from train.data.tar_layout import INDEX_NAME

pytestmark = pytest.mark.usefixtures("small_units")
TINY = SampleOrder(Layout(np.array([2, 0, 0, 2, 3, 2]), np.array([0, -2, 1, 1]), 9), 3, "x")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(images: Path, tars: Path, tmp_path: Path) -> Path:
    """The extracted folder, with the index of its tar in it."""
    copy = shutil.copytree(images, tmp_path / "folder")
    build_index(tars / "ILSVRC2012_img_train.tar", index_dir=copy)
    return copy


def test_auto_is_the_order_of_the_run_before() -> None:
    assert name_order("auto", {}, STREAMED) == STREAMED
    assert name_order("auto", {"order": UNIFORM}, STREAMED) == UNIFORM
    assert name_order(UNIFORM, {"order": STREAMED}, STREAMED) == UNIFORM


def test_a_streamed_order_keeps_window_and_lanes_of_the_run_before() -> None:
    """The window only if units and lanes are the same; a run that was not streamed has none."""
    assert TINY.layout is not None
    choose = partial(order_as_before, TINY.layout, "x", 4)
    fresh = order_along(TINY.layout, "x", 4, None)
    before = {"order": STREAMED, "units": "x", "window": fresh.window - 1}
    assert choose({}) == choose({"order": UNIFORM}) == fresh
    assert choose(before).window == fresh.window - 1
    assert choose(before, None, 2).lanes == 1
    assert choose(before | {"units": "y"}) == choose(before | {"window": "3"}) == fresh
    laned = choose({}, None, 2)
    assert laned.lanes == 2 and choose({}, 1, 2) == fresh
    assert choose(before | {"lanes": 2}).window == fresh.window - 1
    assert choose(before | {"lanes": 2}, 1) == fresh and choose(before, 2) == laned


# --- the order --------------------------------------------------------------------------------


def test_the_small_set_has_many_units_and_a_window(tars: Path) -> None:
    """Otherwise the tests below would compare one uniform order with another."""
    order = open_streamed(tars)
    assert order.layout is not None and len(order.layout.group) > 15
    assert BATCH < order.window < NUM_TRAIN // 2


def test_the_uniform_order_is_what_it_was() -> None:
    assert SampleOrder().permute(5, 3, 100).tolist() == epoch_order(5, 3, 100).tolist()
    assert SampleOrder().identity == {"order": "uniform"}
    assert list(SampleOrder().candidates(3, 5)) == [3, 4, 0, 1, 2]


def test_the_streamed_order_is_that_of_its_layout_and_window(tars: Path) -> None:
    order = open_streamed(tars)
    assert order.layout is not None
    expected = streamed_order(5, 3, order.layout, order.window)
    assert order.permute(5, 3, NUM_TRAIN).tolist() == expected.tolist()
    assert order.permute(5, 3, NUM_TRAIN).tolist() != epoch_order(5, 3, NUM_TRAIN).tolist()
    assert order.identity == {"order": "streamed", "units": order.units, "window": order.window}


def test_a_run_that_goes_on_keeps_its_window() -> None:
    assert TINY.layout is not None
    assert order_along(TINY.layout, "x", 2, 4).window == 4


def test_lanes_are_a_part_of_the_identity_unless_there_is_one() -> None:
    assert TINY.layout is not None
    plain = order_along(TINY.layout, "x", 4, None)
    assert "lanes" not in plain.identity
    assert order_along(TINY.layout, "x", 4, None, 1) == plain
    two = order_along(TINY.layout, "x", 4, 2, 2)
    assert two.identity == {"order": "streamed", "units": "x", "window": 2, "lanes": 2}
    expected = streamed_order(5, 3, TINY.layout, 2, 2, 4)
    assert two.permute(5, 3, 6).tolist() == expected.tolist()
    assert "a window of 2 in each of 2 lanes of 6 images" in two.describe()


def test_a_batch_that_the_lanes_do_not_divide_is_refused() -> None:
    assert TINY.layout is not None
    with pytest.raises(UserError, match="--batch-size 4 cannot be cut into 3 lanes"):
        order_along(TINY.layout, "x", 4, None, 3)


def test_a_set_of_few_batches_is_said_to_hide_little() -> None:
    assert TINY.note_narrow(4).startswith("1 batches of 4 are more than half")
    assert TINY.note_narrow(3) == SampleOrder().note_narrow(10**6) == ""


# --- its layout -------------------------------------------------------------------------------


def test_a_folder_with_the_index_of_its_tar_has_the_order_of_the_tar(
    folder: Path, tars: Path
) -> None:
    ours, theirs = open_streamed(folder), open_streamed(tars)
    assert ours.identity == theirs.identity
    assert ours.permute(1, 1, NUM_TRAIN).tolist() == theirs.permute(1, 1, NUM_TRAIN).tolist()


def test_the_index_of_a_folder_may_lie_in_index_dir_or_in_the_cache(
    images: Path, tars: Path, tmp_path: Path
) -> None:
    tar = tars / "ILSVRC2012_img_train.tar"
    build_index(tar, index_dir=tmp_path / "indexes")
    expected = open_streamed(tars).identity
    assert open_streamed(images, tmp_path / "indexes").identity == expected
    build_index(tar, index_dir=tmp_path / "cache/trainyard/index")
    cached = tmp_path / "cache/trainyard/index"
    (cached / f"0123456789abcdef-{INDEX_NAME}").write_bytes(b"damaged, of another tar")
    (cached / INDEX_NAME).rename(cached / f"123456789abcdef0-{INDEX_NAME}")
    assert open_streamed(images).identity == expected


def test_a_folder_without_an_index_is_told_the_command(images: Path) -> None:
    with pytest.raises(UserError, match=r"write it: python scripts/index_tar\.py --index-dir"):
        open_streamed(images)


def test_an_index_of_other_images_is_no_layout(folder: Path) -> None:
    first = min((folder / "train/n90000001").iterdir(), key=os.fsencode)
    first.rename(first.with_name("n90000001_0.JPEG"))
    with pytest.raises(UserError, match=f"{INDEX_NAME}: of other images"):
        open_streamed(folder)
    (folder / INDEX_NAME).write_bytes(b"damaged")
    with pytest.raises(DataError, match="damaged"):
        open_streamed(folder)


# --- its batches ------------------------------------------------------------------------------


def load_streamed(data: Path, order: SampleOrder, workers: int = 0, start: int = 0) -> object:
    images = open_images(data, order=order)
    return load(images, items_of(images, start), workers)


@pytest.mark.parametrize("decoder", ["pil", "auto"])
def test_workers_ranks_and_a_folder_make_the_same_batches(
    tars: Path, folder: Path, decoder: str
) -> None:
    order = open_streamed(tars)
    images = open_images(tars, order=order, decoder=decoder)
    expected = load(images, items_of(images))
    of_folder = open_images(folder, order=open_streamed(folder), decoder=decoder)
    assert load(of_folder, items_of(images), 2) == expected
    plan = images.plan
    for item in items_of(images):
        if not item.is_val:
            whole = order.permute(SEED, item.epoch, NUM_TRAIN)
            ids = plan.select(whole, item.step_in_epoch, item.part)
            assert images.indices(item).tolist() == ids.tolist()
    for rank in range(2):
        shared = open_images(tars, rank=rank, world=2, order=order, decoder=decoder)
        mine = [item for item in items_of(shared) if not item.is_val]
        assert load(shared, mine, 2) == {item: expected[item] for item in mine}


def test_an_order_in_the_middle_of_an_epoch_goes_on_as_it_would_have(tars: Path) -> None:
    order = open_streamed(tars)
    whole, rest = load_streamed(tars, order), load_streamed(tars, order, workers=2, start=3)
    assert isinstance(whole, dict) and isinstance(rest, dict)
    assert rest.items() <= whole.items() and len(rest) < len(whole)


def test_images_of_another_process_have_the_same_order(tars: Path) -> None:
    images = open_images(tars, order=open_streamed(tars))
    images.warm_up(0)
    packed = pickle.dumps(images)
    copy = pickle.loads(packed)
    assert load(copy, items_of(copy)) == load(images, items_of(images))
    assert len(packed) == len(pickle.dumps(open_images(tars, order=images.order)))  # no caches


# --- bad images -------------------------------------------------------------------------------


def test_substitutes_come_from_the_unit_then_from_the_next_ones() -> None:
    assert list(TINY.candidates(3, 6)) == [3, 5, 0, 4, 1, 2]
    assert list(TINY.candidates(4, 6)) == [4, 1, 2, 0, 3, 5]


def test_a_bad_image_is_replaced_by_one_of_its_unit(folder: Path, tmp_path: Path) -> None:
    order = open_streamed(folder)
    assert order.layout is not None
    unit = order.layout.unit
    first = int(order.permute(SEED, 0, NUM_TRAIN)[0])
    mates = np.flatnonzero(unit == unit[first]).tolist()
    assert len(mates) > 1, "another seed has a first image with mates"
    tries = list(order.candidates(first, NUM_TRAIN))
    for num_bad, substitute in ((1, tries[1]), (len(mates), tries[len(mates)])):
        bad = tries[:num_bad]
        spoiled, names = spoil(folder, tmp_path / f"bad{num_bad}", *bad)
        images = open_images(spoiled, order=order, tolerate_bad=True)
        batch = next(load_batches(images, [Item(0, 0, 0)], 0))
        assert batch.skipped[: len(bad)] == sorted(names)
        assert int(batch.labels[0]) == images.train.labels[substitute]
        uniforms = sample_uniforms(SEED, 0, np.array([first]), UNIFORMS_PER_SAMPLE)[0]
        picture = decode_train(images.train.read(substitute), "", SIZE, uniforms)
        assert np.array_equal(batch.images[0].permute(1, 2, 0).numpy(), picture)
        assert (unit[substitute] == unit[first]) == (num_bad < len(mates))


def test_a_wrong_header_is_not_a_bad_image(tars: Path) -> None:
    """--skip-bad-images does not make a wrong index bearable."""
    images = open_images(tars, order=open_streamed(tars), tolerate_bad=True)
    assert isinstance(images.train, TarSource)
    images.train.index.offset[:] += 512
    with pytest.raises(DataError, match=r"the index of .* is wrong"):
        load(images, items_of(images))
