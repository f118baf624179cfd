"""The batches of a run from its current step on, made from its setup."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from train.data.batches import Batch, BatchOrder, Images, Item
from train.data.loader import copy_ahead, dummy_batches, load_batches
from train.data.patience import PatientBatches, Stop
from train.prepare import Setup
from train.ranks.interrupt import Vote


def make_images(setup: Setup) -> Images:
    """Makes the batches of this rank's share of the plan."""
    data, cfg = setup.dataset, setup.cfg
    assert data is not None
    return Images(
        data.train,
        data.val,
        setup.plan,
        cfg.image_size,
        cfg.seed,
        setup.decoder,
        tolerate_bad=cfg.skip_bad_images > 0,
        pin_memory=setup.placement.device.type == "cuda",
        order=setup.order,
    )


def open_batches(setup: Setup, step: int, validate_first: bool, stop: Stop) -> Iterator[Batch]:
    """Everything to train and validate from a step on, in order.

    stop is called while a batch is waited for; it tells whether this rank wants to end.
    """
    device, total = setup.placement.device, setup.total_steps
    if setup.dataset is None:
        size, num_classes = setup.cfg.image_size, setup.num_classes
        return dummy_batches(BatchOrder(setup.plan, 0, step, total), num_classes, size, device)
    images = make_images(setup)
    order = BatchOrder(setup.plan, len(images.val_batches), step, total, validate_first)
    return _load(setup, images, order, stop)


def open_validation(setup: Setup) -> Iterator[Batch]:
    """One pass over this rank's share of the validation set."""
    images = make_images(setup)
    items = [Item(0, -1, part) for part in range(len(images.val_batches))]
    return _load(setup, images, items, lambda: Vote.GO_ON)


def _load(setup: Setup, images: Images, items: Iterable[Item], stop: Stop) -> Iterator[Batch]:
    device = setup.placement.device
    batches = load_batches(images, items, setup.num_workers)
    return copy_ahead(PatientBatches(batches, images, stop, device), device)
