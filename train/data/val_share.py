"""A share of each class held out for validation, where the data has no such split (no torch)."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np

from dataset.errors import UserError
from dataset.words import count
from train.data.sampler import Int64s, make_words
from train.data.sources import Source
from train.data.splits import Dataset

log = logging.getLogger("trainyard")

_HELD_OUT = 0x5A1E  # sets these keys apart from those of the orders


class Subset:
    """Some images of a source, under numbers of their own."""

    def __init__(self, whole: Source, numbers: Int64s) -> None:
        self.whole, self.numbers = whole, numbers
        self.classes = whole.classes
        self.labels = whole.labels[numbers]

    def __len__(self) -> int:
        return len(self.numbers)

    def name(self, index: int) -> str:
        return self.whole.name(int(self.numbers[index]))

    def where(self, index: int) -> str:
        return self.whole.where(int(self.numbers[index]))

    def explain_wait(self, index: int) -> str:
        return self.whole.explain_wait(int(self.numbers[index]))

    def raw_names(self, start: int, end: int) -> list[bytes]:
        numbers = self.numbers[start:end].tolist()
        if not numbers:
            return []
        names = self.whole.raw_names(numbers[0], numbers[-1] + 1)
        return [names[number - numbers[0]] for number in numbers]

    def read(self, index: int) -> bytes:
        return self.whole.read(int(self.numbers[index]))

    def check_unchanged(self) -> None:
        self.whole.check_unchanged()


def hold_out(dataset: Dataset, share: float | None, seed: int) -> Dataset:
    """The data set with a share of its training images as validation images; None: as it is."""
    if share is None:
        return dataset
    if dataset.val is not None:
        raise UserError(f"{dataset.path} has validation images of its own; leave out --val-share")
    whole = dataset.train
    is_held = choose_held_out(whole.labels, len(whole.classes), share, seed)
    num_held, num_classes = int(is_held.sum()), len(np.unique(whole.labels[is_held]))
    if num_held == 0:
        raise UserError(
            f"--val-share {share:g} of each class is no image: the largest has "
            f"{count(int(np.bincount(whole.labels).max()), 'image')}; give a larger share"
        )
    log.info(
        "%d of %d images (%d of %d classes) are held out for validation: --val-share %g, seed %d",
        *(num_held, len(whole), num_classes, len(whole.classes), share, seed),
    )
    train, val = (Subset(whole, np.flatnonzero(chosen)) for chosen in (~is_held, is_held))
    return replace(dataset, train=train, val=val)


def choose_held_out(
    labels: Int64s, num_classes: int, share: float, seed: int
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Whether each sample is held out: a function of the seed, the sample's number and its class.

    A sample has the same number in a folder and in a tar, and on every rank. Each class gives its
    share, rounded to whole images, and always keeps one to train on.
    """
    sizes = np.bincount(labels, minlength=num_classes)
    num_held = np.minimum(np.floor(share * sizes + 0.5).astype(np.int64), np.maximum(sizes - 1, 0))
    keys = make_words(np.arange(len(labels)), seed, _HELD_OUT)
    in_classes = np.lexsort((keys, labels))  # each class in a random order
    rank = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    is_held = np.zeros(len(labels), np.bool_)
    is_held[in_classes] = rank < np.repeat(num_held, sizes)
    return is_held
