"""The small data set of these tests, opened and read in batches; and a copy of it with damage."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Iterable
from pathlib import Path

from train.data.batches import Batch, BatchOrder, Images, Item
from train.data.decode import choose_decoder
from train.data.loader import load_batches
from train.data.sample_order import SampleOrder, order_along
from train.data.sampler import BatchPlan
from train.data.splits import open_dataset
from train.data.tar_layout import find_layout

SIZE, BATCH, MICROBATCH, SEED = 32, 8, 2, 3
NUM_TRAIN, NUM_VAL = 42, 35


def open_images(
    data: Path,
    *,
    rank: int = 0,
    world: int = 1,
    decoder: str = "pil",
    tolerate_bad: bool = False,
    order: SampleOrder | None = None,
) -> Images:
    dataset = open_dataset(data, None)
    plan = BatchPlan(len(dataset.train), BATCH, MICROBATCH, rank, world)
    chosen = choose_decoder(decoder)
    train, val = dataset.train, dataset.val
    return Images(train, val, plan, SIZE, SEED, chosen, tolerate_bad=tolerate_bad, order=order)


def open_streamed(data: Path, index_dir: Path | None = None) -> SampleOrder:
    """The streamed order of a data set for batches of 8."""
    layout, units = find_layout(open_dataset(data, index_dir).train, data, index_dir)
    return order_along(layout, units, BATCH, None)


def items_of(images: Images, start: int = 0, total: int = 7) -> list[Item]:
    """Five steps an epoch: the second epoch is cut short, and both are validated."""
    return list(BatchOrder(images.plan, len(images.val_batches), start, total))


def digest(batch: Batch) -> tuple[int, list[int]]:
    return zlib.crc32(batch.images.contiguous().numpy().tobytes()), batch.labels.tolist()


def load(images: Images, items: Iterable[Item], workers: int = 0) -> dict[Item, object]:
    items = list(items)
    batches = load_batches(images, items, workers)
    return dict(zip(items, map(digest, batches), strict=True))


def spoil(data: Path, target: Path, *numbers: int, split: str = "train") -> tuple[Path, list[str]]:
    """A copy of the data in which some images, by sample number, are cut in half."""
    copy = shutil.copytree(data, target)
    files = sorted((copy / split).glob("*/*"), key=os.fsencode)
    for number in numbers:
        half = files[number].read_bytes()[: files[number].stat().st_size // 2]
        files[number].write_bytes(half)
    return copy, [str(files[n]) for n in numbers]
