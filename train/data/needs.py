"""When a run first needs each MiB of its tar: from its order of samples and its step (no torch).

Steps are counted from where the run goes on. What a sample needs is its own bytes and not the whole
unit that it lies in: before the first step that would be more than twice as much. The rest of the
unit follows within the window of the order.
"""

from __future__ import annotations

import numpy as np

from dataset.stream.arrivals import ArrivalMap
from dataset.stream.spec import NEVER, Needs, spread_needs
from train.data.sample_order import SampleOrder
from train.data.sampler import Int64s
from train.data.stream_source import StreamSource

HEADERS = 5 * 512  # before an image: its header, and a record with a long name


def find_needs(
    source: StreamSource, order: SampleOrder, seed: int, batch_size: int, step: int, last_step: int
) -> Needs:
    """For each MiB, how many steps after `step` it is needed.

    What proves the classes comes before the run's last step, if nothing needs it earlier.
    """
    index = source.index
    uses = find_uses(order, seed, len(source), batch_size, step)
    begin = np.maximum(0, index.offset - HEADERS)
    needs = spread_needs(begin, index.offset + index.size, uses, index.tar_size)
    begin, end = source.proofs
    at_last = np.full(len(begin), max(0, last_step - step), np.int64)
    return np.minimum(needs, spread_needs(begin, end, at_last, index.tar_size))


def find_uses(
    order: SampleOrder, seed: int, num_samples: int, batch_size: int, step: int
) -> Int64s:
    """For each sample, how many steps after `step` it is used: in this epoch, else in the next."""
    per_epoch = num_samples // batch_size
    epoch, in_epoch = divmod(step, per_epoch)
    uses = np.full(num_samples, NEVER, np.int64)
    for later in (1, 0):  # what is used in this epoch overwrites the next
        samples = order.permute(seed, epoch + later, num_samples)[: per_epoch * batch_size]
        steps = np.arange(len(samples)) // batch_size + later * per_epoch - in_epoch
        uses[samples[steps >= 0]] = steps[steps >= 0]
    return uses


def count_ahead(needs: Needs, arrivals: ArrivalMap) -> int:
    """For how many steps all is here; NEVER if that is so for all that are planned."""
    missing = needs[arrivals.here == 0]
    return int(missing.min()) if len(missing) else NEVER


def count_first_steps(order: SampleOrder, num_samples: int, batch_size: int, step: int) -> int:
    """The steps of the first window, or to the end of the epoch: then validation is needed."""
    per_epoch = num_samples // batch_size
    window = order.window if order.layout is not None else num_samples
    return min(-(-window * order.lanes // batch_size), per_epoch - step % per_epoch)
