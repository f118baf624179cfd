"""Which batches a run needs, in order, and how each is made from images."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dataset.errors import CommandError, DataError
from dataset.words import count
from train.data.decode import UNIFORMS_PER_SAMPLE, Decoder, Uniforms
from train.data.readers import Pace, Reads
from train.data.sample_order import SampleOrder
from train.data.sampler import (
    MAX_VAL_BATCH,
    BatchPlan,
    Int64s,
    sample_uniforms,
    split_validation,
)
from train.data.sources import Source

LOOK_S = 30.0  # seconds between two looks at a tar: on a network disk each is a question


class Item(NamedTuple):
    """A piece of work for the loader: one microbatch of a step, or one batch of validation."""

    epoch: int
    step_in_epoch: int  # -1: validation
    part: int  # the number of the microbatch in the global step, or of the validation batch

    @property
    def is_val(self) -> bool:
        return self.step_in_epoch < 0

    @property
    def is_first(self) -> bool:
        """Whether an epoch or a validation begins with it, or with its step."""
        return self.part == 0 if self.is_val else self.step_in_epoch == 0


class Batch(NamedTuple):
    """Images as uint8 [n, 3, size, size] in channels-last memory, and their labels."""

    images: torch.Tensor
    labels: torch.Tensor
    skipped: list[str]  # the images that could not be decoded
    error: str  # not empty: why the batch could not be made
    kind: type[CommandError] = DataError  # of the error: it has the exit code


@dataclass(frozen=True)
class BatchOrder:
    """The work of a run from one global step on, in order; the loader and the loop both use it."""

    plan: BatchPlan
    num_val_batches: int
    start_step: int
    total_steps: int
    validate_first: bool = False  # the epoch before start_step was trained and not yet validated

    def __iter__(self) -> Iterator[Item]:
        per_epoch = self.plan.steps_per_epoch
        if self.validate_first:
            for part in range(self.num_val_batches):
                yield Item((self.start_step - 1) // per_epoch, -1, part)
        for step in range(self.start_step, self.total_steps):
            epoch, in_epoch = divmod(step, per_epoch)
            for part in self.plan.my_microbatches:
                yield Item(epoch, in_epoch, part)
            if in_epoch == per_epoch - 1 or step == self.total_steps - 1:
                for part in range(self.num_val_batches):
                    yield Item(epoch, -1, part)


@dataclass
class Draft:
    """A batch that is being filled, slot by slot, by one thread or by several."""

    item: Item
    indices: Int64s
    uniforms: Uniforms | None  # None: validation
    images: torch.Tensor  # uint8 [n, size, size, 3]
    pixels: npt.NDArray[np.uint8]  # the same memory
    labels: torch.Tensor  # int64 [n]
    label_values: Int64s  # the same memory
    skipped: list[tuple[int, str]] = field(default_factory=list)

    def finish(self) -> Batch:
        names = [name for _, name in sorted(self.skipped)]
        # NHWC in memory is what torch calls channels_last.
        images = self.images.permute(0, 3, 1, 2)
        return Batch(images, self.labels, names, "")


class Images:
    """Makes the batch of an item; exists in every worker, and has no state but caches."""

    def __init__(
        self,
        train: Source,
        val: Source | None,
        plan: BatchPlan,
        image_size: int,
        seed: int,
        decoder: Decoder,
        *,
        tolerate_bad: bool = False,
        pin_memory: bool = False,
        order: SampleOrder | None = None,
    ) -> None:
        self.train, self.val, self.plan = train, val, plan
        self.image_size, self.seed, self.decoder = image_size, seed, decoder
        self.tolerate_bad, self.pin_memory = tolerate_bad, pin_memory
        self.order = order or SampleOrder()
        self.val_batches: list[Int64s] = []
        if val is not None:
            batch = min(plan.microbatch, MAX_VAL_BATCH)
            self.val_batches = split_validation(len(val), batch, plan.rank, plan.world_size)
        self._order = functools.lru_cache(maxsize=2)(self._make_order)
        self.reads = Reads()
        # Held while an image is decoded: there may be more reading threads than cores.
        self.pace: Pace | None = None  # of the loader's threads
        self._looked_s = time.monotonic()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_order", "reads", "pace")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._order = functools.lru_cache(maxsize=2)(self._make_order)
        self.reads = Reads()
        self.pace = None

    def _make_order(self, epoch: int) -> Int64s:
        return self.order.permute(self.seed, epoch, len(self.train))

    def warm_up(self, epoch: int) -> None:
        """Computes an epoch's order ahead: 1.28 million keys take a tenth of a second to sort."""
        self._order(epoch)

    def indices(self, item: Item) -> Int64s:
        """The samples of an item."""
        if item.is_val:
            return self.val_batches[item.part]
        return self.plan.select(self._order(item.epoch), item.step_in_epoch, item.part)

    def where(self, is_val: bool, index: int) -> str:
        """Where the bytes of a sample are."""
        return self._source(is_val).where(index)

    def explain_wait(self, is_val: bool, index: int) -> str:
        """What to say of a sample that takes very long to read."""
        return self._source(is_val).explain_wait(index)

    def _source(self, is_val: bool) -> Source:
        source = self.val if is_val else self.train
        assert source is not None
        return source

    def __getitem__(self, item: Item) -> Batch:
        """The whole batch, made in this thread; an error is returned in it, not raised."""
        try:
            draft = self.draft(item)
            self.fill(draft, 0, len(draft.indices))
            return draft.finish()
        except CommandError as error:
            empty = torch.empty(0)
            return Batch(empty, empty, [], str(error), type(error))

    def draft(self, item: Item) -> Draft:
        """An empty batch for an item, with what is needed to fill its slots."""
        indices, size = self.indices(item), self.image_size
        source = self._source(item.is_val)
        self._look_at_source(source, item.is_first)
        images = self._empty((len(indices), size, size, 3), torch.uint8)
        labels = self._empty((len(indices),), torch.int64)
        label_values = labels.numpy()
        label_values[:] = source.labels[indices]
        uniforms = None
        if not item.is_val:
            uniforms = sample_uniforms(self.seed, item.epoch, indices, UNIFORMS_PER_SAMPLE)
        return Draft(item, indices, uniforms, images, images.numpy(), labels, label_values)

    def _look_at_source(self, source: Source, is_start: bool) -> None:
        """Checks whether the data was overwritten, at the start of an epoch and now and then."""
        now_s = time.monotonic()
        if is_start or now_s - self._looked_s > LOOK_S:
            source.check_unchanged()
            self._looked_s = now_s

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory for a batch; pinned for a GPU, as only then a copy does not block the caller."""
        return torch.empty(shape, dtype=dtype, pin_memory=self.pin_memory)

    def fill(self, draft: Draft, start: int, end: int) -> None:
        """Decodes the images of some slots."""
        fill_slot = self._fill_val if draft.item.is_val else self._fill_train
        with self.pace.turn() if self.pace else nullcontext():
            for slot in range(start, end):
                fill_slot(draft, slot)

    def _read(self, source: Source, is_val: bool, index: int) -> bytes:
        with self.pace.reading() if self.pace else nullcontext():
            return self.reads.read(source, is_val, index)

    def _decoding(self) -> AbstractContextManager[None]:
        return self.pace.decoding() if self.pace else nullcontext()

    def _fill_train(self, draft: Draft, slot: int) -> None:
        """The wanted sample, or the first of its substitutes that can be decoded."""
        assert draft.uniforms is not None
        for index in self.order.candidates(int(draft.indices[slot]), len(self.train)):
            where, data = self.train.where(index), self._read(self.train, False, index)
            try:
                with self._decoding():
                    self.decoder.train(data, where, draft.uniforms[slot], draft.pixels[slot])
                draft.label_values[slot] = self.train.labels[index]
                return
            except DataError as error:
                self._refuse(error)
                draft.skipped.append((slot, where))
        raise DataError("no training image can be decoded; is the data damaged?")

    def _fill_val(self, draft: Draft, slot: int) -> None:
        """The sample, or label -1, which is not counted."""
        assert self.val is not None
        index = int(draft.indices[slot])
        where, data = self.val.where(index), self._read(self.val, True, index)
        try:
            with self._decoding():
                self.decoder.val(data, where, draft.pixels[slot])
        except DataError as error:
            self._refuse(error)
            draft.pixels[slot] = 0
            draft.label_values[slot] = -1
            draft.skipped.append((slot, where))

    def _refuse(self, error: DataError) -> None:
        """Raises if an image cannot be decoded, unless such images are tolerated."""
        if not self.tolerate_bad:
            raise DataError(
                f"{error}; --skip-bad-images N leaves out up to N such images per epoch"
            ) from None


def check_skipped(skipped: int, allowed: int) -> None:
    """Raises when more images than allowed were skipped; their names are in the log."""
    if skipped > allowed:
        raise DataError(
            f"{count(skipped, 'image')} of this epoch cannot be decoded (see the log "
            f"for names); --skip-bad-images allows {allowed}"
        )
