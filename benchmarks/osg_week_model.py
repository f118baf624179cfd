"""What a job of the OSG study would have waited for its data: a pure function of its row.

    as it was  N transfers cut at HTCondor's limit, the time between two tries, the last transfer
    fetch      the same link without the limit: nothing is cut, so what arrived is kept
    streaming  the same link; a step waits only for the units that its images lie in

Nothing here was measured on the OSPool: the rows give the rates, and the rest is assumed. What is
assumed stands in ASSUMPTIONS and is shown wherever a result is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.order import BATCH, cut
from dataset.errors import DataError
from dataset.federation.lookup import Options
from dataset.known_archives import published_archives
from dataset.names import TRAIN_TAR
from report.grid.jobs import IN_TRANSFER
from report.grid.rows import GridJob
from train.data.streamed_order import Layout, choose_window, streamed_order

Floats = npt.NDArray[np.float64]
LIMIT_S = 3600.0  # STARTER_FILE_XFER_STALL_TIMEOUT: the run time of a transfer plugin
EPOCHS = 5
INDEX_BYTES = 60e6  # 47 bytes for each of 1,281,167 images
SILENCE_S = Options().stall_s
OBJECT_BYTES = next(
    archive.num_bytes for archive in published_archives().values() if archive.file == TRAIN_TAR
)
_EVICTED = re.compile(r"\bevicted\b")


@dataclass(frozen=True)
class Reading:
    """What a stall may have been; the rows do not say."""

    key: str
    words: str
    hour_share: float = 0.0  # of the object: what a transfer had brought when it was cut
    others_answer: bool = False  # servers that were not asked, while one is silent


READINGS = (
    Reading("slow_half", "slow: half arrived", hour_share=0.5),
    Reading("slow_tenth", "slow: a tenth arrived", hour_share=0.1),
    Reading("silent", "silent: another server answers", others_answer=True),
    Reading("silent_all", "silent: no server answers"),
)
ASSUMPTIONS = (
    f"the object is ILSVRC2012_img_train.tar, {OBJECT_BYTES / 1e9:.1f} GB; with it comes its "
    f"index, {INDEX_BYTES / 1e6:.0f} MB, for our fetch and for streaming",
    "the rate of a job's link is that of its last transfer, the one that arrived; several caches "
    "at once are not credited",
    f"each stall was a transfer that HTCondor ended after {LIMIT_S:,.0f} s and that started again "
    "at byte 0; what is left of the time before the last transfer was spent between "
    "two tries (hold, queue, next match)",
    "where stalls were slow, half or a tenth of the object had arrived at the cut (the rows do not "
    "say how much); the link stays so slow, also between two tries, until the row's last transfer "
    "began, and then has that transfer's rate; our fetch and streaming keep what arrived",
    "where stalls were silent and another server answers, each costs our fetch and streaming "
    f"{SILENCE_S:.0f} s (--stall-seconds), before the first step; where none answers, nothing "
    "arrives before the row's last transfer began",
    "evictions happen all the same: what rows without a stall, or with an eviction, lost beside "
    f"the {LIMIT_S:,.0f} s of each stall is lost in every way (in it are 19,746 s that job "
    "794570.010 computed before its eviction)",
    f"an epoch takes a fifth of the row's execution time ({EPOCHS} epochs); the study's unpacking "
    "is in it, so more of the link is hidden than would be; a job that failed has its site's "
    "median",
    f"streaming has batches of {BATCH}, in the order of seed 0 on a tar of 1,000 classes with "
    "1,281 images of one size each; a step waits for the units of its images, units arrive in the "
    "order of need, the disk holds the whole object, epochs 2 to 5 read from it",
    "the 16 jobs that were held by a 404 wait their recorded second in every way; the 20 hours "
    "after which two jobs were held are not replayed; the start of Python and torch is not counted",
)


@dataclass(frozen=True)
class Parts:
    """The time before a job executed, as its row has it."""

    cut_s: float  # transfers that were ended at the limit
    between_s: float  # from a cut transfer to the next one
    kept_s: float  # what no other way of transfer would have changed
    last_s: float

    @property
    def retried_s(self) -> float:
        """What the study calls wasted: everything before the last transfer."""
        return self.cut_s + self.between_s + self.kept_s

    @property
    def waited_s(self) -> float:
        return self.retried_s + self.last_s


def split_wait(job: GridJob) -> Parts:
    """The parts of a job's wait under the limit; a row that contradicts it is refused."""
    cut_s = LIMIT_S * job.num_stalls
    rest_s = job.transfer_retried_s - cut_s
    if rest_s < 0:
        raise DataError(
            f"{job.job_id}: {job.num_stalls} stalls of {LIMIT_S:,.0f} s do not fit into the "
            f"{job.transfer_retried_s:,.0f} s before its last transfer; check the row"
        )
    if not 0 < job.transfer_last_s < LIMIT_S:
        raise DataError(
            f"{job.job_id}: a last transfer of {job.transfer_last_s:,.0f} s; one that arrived took "
            f"more than 0 s and less than {LIMIT_S:,.0f} s; check the row"
        )
    is_kept = job.num_stalls == 0 or _EVICTED.search(job.detail) is not None
    between_s, kept_s = (0.0, rest_s) if is_kept else (rest_s, 0.0)
    return Parts(cut_s, between_s, kept_s, job.transfer_last_s)


@dataclass(frozen=True)
class Link:
    """A link with a bad spell at its beginning."""

    spell_s: float
    spell_rate: float  # bytes/s; 0 is silence
    rate: float

    def arrival_s(self, num_bytes: Floats) -> Floats:
        """When that many bytes are here."""
        in_spell = self.spell_rate * self.spell_s
        late = self.spell_s + (num_bytes - in_spell) / self.rate
        if self.spell_rate == 0:
            return late
        return np.where(num_bytes <= in_spell, num_bytes / self.spell_rate, late)


def make_link(parts: Parts, num_stalls: int, reading: Reading) -> Link:
    """The link that a reading of the stalls makes of a row."""
    rate = OBJECT_BYTES / parts.last_s
    if reading.others_answer:
        return Link(SILENCE_S * num_stalls, 0.0, rate)
    return Link(parts.cut_s + parts.between_s, reading.hour_share * OBJECT_BYTES / LIMIT_S, rate)


def wait_of_fetch(link: Link) -> float:
    """Seconds until the whole object is on the disk."""
    return float(link.arrival_s(np.array([INDEX_BYTES + OBJECT_BYTES], np.float64))[0])


def waits_of_stream(link: Link, needed: Floats, epoch_s: float) -> tuple[float, float]:
    """Seconds before the first step, and all seconds of epoch 1 in which training waits.

    `needed` is the share of the object that each step needs. Step k starts when it is there, and
    not before the k steps ahead of it have been computed.
    """
    arrival_s = link.arrival_s(INDEX_BYTES + needed * OBJECT_BYTES)
    computed_s = np.arange(len(needed)) * (epoch_s / len(needed))
    return float(arrival_s[0]), float((arrival_s - computed_s).max())


def share_needed() -> Floats:
    """The share of the object that must have arrived before each step of epoch 1."""
    units = cut()
    layout = Layout(units.unit, units.group, int(units.bounds[-1]))
    order = streamed_order(0, 0, layout, choose_window(layout, BATCH))
    num_steps = len(order) // BATCH
    step = np.repeat(np.arange(num_steps), BATCH)
    first = np.full(len(units), num_steps)  # step of each unit; those of the dropped tail come last
    np.minimum.at(first, units.unit[order[: len(step)]], step)
    num_bytes = np.bincount(first, weights=units.num_bytes, minlength=num_steps)[:num_steps]
    needed: Floats = np.cumsum(num_bytes) / units.bounds[-1]
    return needed


def has_arrived(job: GridJob) -> bool:
    """Whether the job ever got its data."""
    return job.phase != IN_TRANSFER
