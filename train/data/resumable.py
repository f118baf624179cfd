"""Ready batches for a training loop that is not ours, and where that loop stands in them."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from dataset.errors import PassingError, UserError
from train.data.batches import Batch, Images, Item, check_skipped
from train.data.loader import explain_dead_worker, is_dead_worker, load_batches
from train.data.patience import PatientBatches
from train.data.sample_order import SampleOrder
from train.ranks.interrupt import Vote

log = logging.getLogger("trainyard")

VERSION = 1  # of a state; another one is refused
CPU = torch.device("cpu")


class Arrival:
    """How the images of a loop come; those of local data are here."""

    def follow(self, order: SampleOrder, step: int) -> None:
        """A loop begins at this step, counted from the first epoch."""

    def look(self) -> None:
        """An epoch has ended; raises if what has come is not what it should be."""

    def close(self) -> None:
        """There will be no more loops."""


class ResumableBatches:
    """(images, labels) of this rank, an epoch in each `for`; state_dict() says where it stands.

    Images are uint8 [n, 3, size, size], labels int64 [n]. A batch counts as soon as it is handed
    out. What was decoded ahead does not count.
    """

    def __init__(
        self,
        make_images: Callable[[SampleOrder], Images],
        choose_order: Callable[[Mapping[str, Any]], SampleOrder],
        identity: Mapping[str, Any],
        num_workers: int,
        skip_bad_images: int = 0,
        arrival: Arrival | None = None,
    ) -> None:
        """choose_order: by the identity in a state; by an empty one for a fresh start."""
        self._make_images, self._choose_order = make_images, choose_order
        self._order, self._own_identity = choose_order({}), dict(identity)
        self._num_workers, self._skip_bad_images = num_workers, skip_bad_images
        self._arrival, self._is_followed = arrival or Arrival(), False
        self._items = list_items(make_images(self._order))
        self._epoch = self._step = 0
        self._goes_on = False  # the next loop begins at this step, not with a new epoch
        self._loop = object()  # the one that may take batches

    @property
    def _identity(self) -> dict[str, Any]:
        return self._order.identity | self._own_identity

    def close(self) -> None:
        """Ends the fetcher of a URL that is streamed; what has arrived stays on the disk."""
        self._arrival.close()

    def __enter__(self) -> ResumableBatches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        """The batches of a whole epoch."""
        return len(self._items)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Makes the next loop an epoch of this number, or the rest of it if a state says so."""
        if not (self._goes_on and epoch == self._epoch):
            self._is_followed &= (epoch, 0) == (self._epoch, self._step)
            self._epoch, self._step, self._goes_on = epoch, 0, False

    @property
    def batch_sampler(self) -> SimpleNamespace:
        """Where Lightning looks for a `sampler` with set_epoch, which it calls before each epoch.

        It needs this: after a checkpoint at the end of an epoch it loads no state into a loader.
        """
        return SimpleNamespace(sampler=self)

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands: small, plain numbers and words, for a checkpoint or JSON."""
        return {
            "version": VERSION,
            "epoch": self._epoch,
            "step": self._step,
            "identity": self._identity,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Lets the next loop go on after the last batch that was handed out before the state."""
        version = state.get("version") if isinstance(state, Mapping) else None
        if version != VERSION:
            raise UserError(
                f"the state has version {version!r}, this code reads version {VERSION}; give a "
                "state_dict() of batches(), and load it with the code that made it"
            )
        identity, epoch, step = (state.get(name) for name in ("identity", "epoch", "step"))
        if not isinstance(identity, Mapping) or type(epoch) is not int or type(step) is not int:
            raise UserError(f"the state is not one of batches(): {sorted(state)}")
        order = self._choose_order(identity)
        self._refuse_changes(identity, order.identity | self._own_identity)
        if not (epoch >= 0 and 0 <= step < len(self)):
            raise UserError(f"the state stands at step {step} of {len(self)} in epoch {epoch}")
        self._epoch, self._step, self._goes_on = epoch, step, True
        self._order, self._is_followed = order, False

    def _refuse_changes(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        names = sorted(before.keys() | now.keys())
        pairs = [(name, before.get(name), now.get(name)) for name in names]
        told = ", ".join(f"{name}: {old} -> {new}" for name, old, new in pairs if old != new)
        if told:
            raise UserError(
                f"the state is of other batches ({told}); open them as before, or start anew"
            )

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if self._step and not self._goes_on:  # the last loop was left before its end
            self._epoch, self._step = self._epoch + 1, 0
        self._goes_on = False
        loop = self._loop = object()
        if not self._is_followed:
            self._arrival.follow(self._order, self._epoch * len(self) + self._step)
            self._is_followed = True
        num_skipped = 0
        for batch in self._load():
            if self._loop is not loop:
                raise UserError("another loop over these batches has begun; open them twice")
            num_skipped += len(batch.skipped)
            for name in batch.skipped:
                log.warning("skipped an image that cannot be decoded: %s", name)
            check_skipped(num_skipped, self._skip_bad_images)
            self._step += 1
            if self._step == len(self):
                self._epoch, self._step = self._epoch + 1, 0
                self._arrival.look()
            yield batch.images, batch.labels

    def _load(self) -> Iterator[Batch]:
        """The rest of the epoch, decoded ahead by threads or workers of this loop alone."""
        images = self._make_images(self._order)
        items = [item._replace(epoch=self._epoch) for item in self._items[self._step :]]
        batches = load_batches(images, items, self._num_workers)
        dead: PassingError | None = None
        try:
            yield from PatientBatches(batches, images, lambda: Vote.GO_ON, CPU)
        except RuntimeError as error:
            if not is_dead_worker(error):
                raise
            dead = explain_dead_worker(error)
            # They hold the loader, for which torch would raise again when any child ends.
            traceback.clear_frames(error.__traceback__)
        if dead is not None:
            raise dead


def list_items(images: Images) -> list[Item]:
    """The batches of this rank in one epoch, or in one pass over the validation set."""
    if images.val is not None:
        return [Item(0, -1, part) for part in range(len(images.val_batches))]
    (part,) = images.plan.my_microbatches
    return [Item(0, step, part) for step in range(images.plan.steps_per_epoch)]
