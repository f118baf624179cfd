"""The data plane for any PyTorch training loop: images one by one, or batches that are ready.

    from train.torch_data import batches, open_images

    open_images("data")                    # a Dataset, in place of torchvision's ImageFolder
    batches("data", batch_size=256)        # uint8 batches, with state_dict and load_state_dict

`data` is what `python -m train` takes: a folder with train/ and val/, or with the ILSVRC tars, or
the URL of one, or those of a train and a val tar with a comma between. One tar, and a folder of
class folders, will do as well. The tar of a URL is read while it arrives if there is an index with
checksums beside it. docs/pytorch.md has more.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from dataset.errors import UserError
from train import __version__
from train.data.batches import Images
from train.data.decode import choose_decoder
from train.data.image_dataset import (
    CentreCrop,
    Decode,
    ImageDataset,
    RandomCrop,
    Split,
    whole_image,
)
from train.data.resumable import ResumableBatches
from train.data.sample_order import STREAMED, UNIFORM, SampleOrder, name_order, order_as_before
from train.data.sampler import BatchPlan, check_batch
from train.data.sources import Source
from train.data.splits import fingerprint_of
from train.data.stream_source import StreamSource
from train.data.tar_layout import find_layout
from train.open_data import open_source
from train.ranks.cpus import cpus_of_rank
from train.ranks.launch import detect_launch
from train.stream.loop_stream import StreamArrival

__all__ = [
    "CentreCrop",
    "ImageDataset",
    "RandomCrop",
    "ResumableBatches",
    "__version__",
    "batches",
    "open_images",
]

MAX_WORKERS = 16  # as the trainer has it for a GPU

Place = str | os.PathLike[str]


def open_images(
    source: Place,
    split: Split = "train",
    transform: Callable[[Any], Any] | None = None,
    target_transform: Callable[[Any], Any] | None = None,
    *,
    decode: Decode = whole_image,
    allow_empty: bool = False,
    index_dir: Place | None = None,
    data_dir: Place | None = None,
    federation: str | None = None,
    token: Place | None = None,
    stream: Literal["auto", "never", "always"] = "auto",
    index: Place | None = None,
) -> ImageDataset:
    """A map-style Dataset over a folder, a tar in place or a URL: ImageFolder's drop-in.

    An item is (image, class), and goes through transform and target_transform. By default the image
    is Pillow's, as ImageFolder's. decode=RandomCrop(224) and decode=CentreCrop(224) make a uint8
    tensor with the trainer's decoder; any other function of (bytes, name) will do.

    split: of a data set; one tar, or a folder of class folders, is a split by itself.
    index_dir: where the index of a tar goes if its folder cannot be written.
    data_dir, federation, token, stream, index: of a URL, as the flags of `python -m train`. In a
    stream an image that somebody waits for comes next.
    """
    opened = _open(
        source,
        split,
        allow_empty=allow_empty,
        index_dir=index_dir,
        data_dir=data_dir,
        federation=federation,
        token=token,
        stream=stream,
        index=index,
    )
    opened.transform, opened.target_transform = transform, target_transform
    opened.decode = decode
    if opened.stream is not None:
        opened.stream.serve()
    return opened


def batches(
    source: Place | ImageDataset,
    batch_size: int,
    split: Split | None = None,
    *,
    image_size: int = 224,
    seed: int = 0,
    order: Literal["auto", "uniform", "streamed"] = "auto",
    decoder: Literal["auto", "kernel", "pil"] = "auto",
    num_workers: int | None = None,
    pin_memory: bool = False,
    skip_bad_images: int = 0,
    rank: int | None = None,
    world_size: int | None = None,
    index_dir: Place | None = None,
    data_dir: Place | None = None,
    federation: str | None = None,
    token: Place | None = None,
    stream: Literal["auto", "never", "always"] = "auto",
    index: Place | None = None,
) -> ResumableBatches:
    """An iterator of (uint8 images, labels), made by the trainer's threads in its own order.

    Each `for` over it is an epoch. "train" gives random crops in whole batches, in another order
    every epoch; "val" gives the centres of all images once, in their order.

    source: as open_images takes it, or what open_images returned; only its place and split count.
    batch_size: of all ranks together, as -b of the trainer; this rank gets its share.
    seed, order, decoder, image_size, skip_bad_images: as the flags of `python -m train`. An image
    of "val" that is skipped has the label -1. order="auto": that of the state which is loaded, else
    streamed for a URL that is streamed, uniform for local data.
    num_workers: cores that decode; default: those of this rank. 0: in the calling thread.
    rank, world_size: default: those of torch.distributed, if it is initialised.
    index_dir, data_dir, federation, token, stream, index: as of open_images, if that did not open
    the source.
    """
    _check_least(1, batch_size=batch_size, image_size=image_size)
    _check_least(0, num_workers=num_workers or 0, skip_bad_images=skip_bad_images)
    if order not in ("auto", UNIFORM, STREAMED):
        raise UserError(f"order {order!r} is none of 'auto', {UNIFORM!r} and {STREAMED!r}")
    is_given = rank is not None
    rank, world_size = _find_ranks(rank, world_size)
    is_own = not isinstance(source, ImageDataset)
    opened = (
        source
        if isinstance(source, ImageDataset)
        else _open(
            source,
            split or "train",
            index_dir=index_dir,
            data_dir=data_dir,
            federation=federation,
            token=token,
            stream=stream,
            index=index,
        )
    )
    if split not in (None, opened.split):
        raise UserError(f"split {split!r}: the images were opened as split {opened.split!r}")
    is_train = opened.split == "train"
    plan = _make_plan(is_train, len(opened), batch_size, rank, world_size)
    chosen = choose_decoder(decoder)
    identity = {
        "data": fingerprint_of(opened.source),
        "is_train": is_train,
        "batch_size": batch_size,
        "image_size": image_size,
        "seed": seed,
        "decoder": chosen.name,
    }
    if not is_train:  # rank r of n has the images r, r + n, r + 2 n ...
        identity |= {"world_size": world_size}
    make_images = partial(
        _make_images,
        opened.source,
        is_train=is_train,
        is_given=is_given,
        plan=plan,
        image_size=image_size,
        seed=seed,
        decoder=chosen,
        tolerate_bad=skip_bad_images > 0,
        pin_memory=pin_memory,
    )
    return ResumableBatches(
        make_images,
        partial(_choose_order, order, opened, is_train, batch_size),
        identity,
        _count_cores(world_size) if num_workers is None else num_workers,
        skip_bad_images,
        StreamArrival(opened, is_own, is_train, seed, batch_size),
    )


def _open(
    source: Place,
    split: Split,
    *,
    allow_empty: bool = False,
    index_dir: Place | None,
    data_dir: Place | None,
    federation: str | None,
    token: Place | None,
    stream: str,
    index: Place | None,
) -> ImageDataset:
    """The images of a source; a stream of them does not begin yet."""
    if split not in ("train", "val"):
        raise UserError(f"split {split!r} is neither 'train' nor 'val'")
    images, root, found = open_source(
        os.fspath(source),
        split,
        index_dir=_path(index_dir),
        data_dir=_path(data_dir),
        federation=federation,
        token=_path(token),
        allow_empty=allow_empty,
        stream=stream,
        index=os.fspath(index) if index is not None else None,
    )
    return ImageDataset(images, root, split, stream=found)


def _path(place: Place | None) -> Path | None:
    return None if place is None else Path(place)


def _check_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if value < least:
            raise UserError(f"{name}={value} must be at least {least}")


def _find_ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """(rank, world size): as given, else as torch.distributed has them, else one rank."""
    if (rank is None) != (world_size is None):
        raise UserError("give both rank and world_size, or neither")
    if rank is None or world_size is None:
        is_joined = dist.is_available() and dist.is_initialized()
        return (dist.get_rank(), dist.get_world_size()) if is_joined else (0, 1)
    if not 0 <= rank < world_size:
        raise UserError(f"rank={rank} is not one of {world_size} ranks, which count from 0")
    return rank, world_size


def _make_plan(
    is_train: bool, num_samples: int, batch_size: int, rank: int, world_size: int
) -> BatchPlan:
    """One microbatch a rank; a validation need not be split evenly."""
    if is_train:
        check_batch(num_samples, batch_size, world_size)
    of_rank = max(1, batch_size // world_size)
    return BatchPlan(num_samples, of_rank * world_size, of_rank, rank, world_size)


def _choose_order(
    name: str, images: ImageDataset, is_train: bool, batch_size: int, before: Mapping[str, Any]
) -> SampleOrder:
    """As named; "auto": as before, else by where the data is; with the window from before."""
    is_streamed = is_train and isinstance(images.source, StreamSource)
    if name_order(name, before, STREAMED if is_streamed else UNIFORM) != STREAMED:
        return SampleOrder()
    layout, units = find_layout(images.source, images.root, None)
    return order_as_before(layout, units, batch_size, before, lanes=1)


def _make_images(
    source: Source,
    order: SampleOrder,
    *,
    is_train: bool,
    is_given: bool,
    plan: BatchPlan,
    **settings: Any,
) -> Images:
    if not is_given and _find_ranks(None, None) != (plan.rank, plan.world_size):
        raise UserError(
            "batches() was called before torch.distributed was initialised, so every rank would "
            "get the same images; call it afterwards (with Lightning: in train_dataloader and "
            "val_dataloader), or give rank and world_size"
        )
    return Images(source, None if is_train else source, order=order, plan=plan, **settings)


def _count_cores(world_size: int) -> int:
    """The cores that decode: this rank's own."""
    local_size = detect_launch(os.environ).local_world_size if world_size > 1 else 1
    return min(MAX_WORKERS, cpus_of_rank(os.environ, local_size))
