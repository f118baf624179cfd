"""What the design of streaming promised, as numbers of benchmarks/stream.py's rows, and the judge.

The first step of the real set is modelled: what the measured first step cost beside its bytes, and
the bytes that the real order needs at a slow link.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from benchmarks.bench import median
from benchmarks.order import BATCH as REAL_BATCH
from benchmarks.osg_week_model import INDEX_BYTES

CURL, FETCH, STREAM, LOCAL = "curl, then train", "our fetch, then train", "ours, streamed", "local"
SHUFFLED = "ours, streamed, all shuffled"  # the order as it is for a set that a window holds
SLOW_STEP, LOCAL_SLOW = "ours, streamed, slower step", "local, slower step"
SMALL_DISK, HALF_DISK = "ours, streamed, 15 % disk", "ours, streamed, 50 % disk"
DISK_SHARES = {SMALL_DISK: 0.15, HALF_DISK: 0.5}  # of the tar, in use and kept together
TWO_NODES = "ours, streamed, 2 nodes"
PELICANFS, WEBDATASET, MOSAIC = "pelicanfs", "webdataset", "mosaicml-streaming"
# They take half of the time, and nothing that was promised is a ratio of theirs.
UNPROMISED, ONCE = (CURL, SHUFFLED, HALF_DISK, PELICANFS, WEBDATASET, MOSAIC), 1
FETCHER, SILENT = "the fetcher is killed", "a cache falls silent"
REAL_RATE = 40e6
Result = dict[str, Any]
Round = dict[str, dict[str, Any]]  # a row of each way


@dataclass(frozen=True)
class Target:
    """A number that the design promised, and what was reached."""

    what: str
    reached: float
    bound: float
    is_upper: bool  # reached must be at most the bound
    unit: str = ""

    @property
    def is_met(self) -> bool:
        return self.reached <= self.bound if self.is_upper else self.reached >= self.bound

    @property
    def cells(self) -> list[str]:
        sign = "<=" if self.is_upper else ">="
        bound = f"{sign} {self.bound:g}{self.unit}"
        reached = f"{self.reached:.1f}{self.unit}" if self.unit else f"{self.reached:.3f}"
        return [self.what, reached, bound, "yes" if self.is_met else "no"]


@dataclass(frozen=True)
class Promise:
    """A number that is made of some rows of one round, and its bound."""

    needs: set[str]
    what: str
    value: Callable[[Round, Result], float]
    _: KW_ONLY
    at_most: float | None = None
    at_least: float | None = None
    unit: str = ""

    def judge(self, result: Result) -> Target:
        """The median over the rounds."""
        rows = {name: result["rows"][name] for name in self.needs}
        rounds = [dict(zip(rows, one, strict=True)) for one in zip(*rows.values(), strict=True)]
        reached = median([self.value(single, result) for single in rounds])
        bound = self.at_most if self.at_most is not None else self.at_least
        assert bound is not None
        return Target(self.what, reached, bound, self.at_most is not None, self.unit)


def start_s(local: dict[str, Any], step_s: float) -> float:
    """The start of Python and the trainer: what a local run needs until its first step begins."""
    return float(local["first_step_s"]) - step_s


def with_link_the_limit(single: Round, result: Result) -> float:
    local_start_s = start_s(single[LOCAL], result["compute_s"] / result["steps"])
    limit_s = max(result["link_s"], result["compute_s"])
    return float((single[STREAM]["epoch_1_s"] - local_start_s) / limit_s)


def with_compute_the_limit(single: Round, result: Result) -> float:
    local_start_s = start_s(single[LOCAL_SLOW], result["slow_compute_s"] / result["steps"])
    limit_s = max(result["link_s"], result["slow_compute_s"])
    return float((single[SLOW_STEP]["epoch_1_s"] - local_start_s) / limit_s)


def with_local_the_limit(single: Round, result: Result) -> float:
    local_start_s = start_s(single[LOCAL_SLOW], result["slow_compute_s"] / result["steps"])
    limit_s = max(result["link_s"], single[LOCAL_SLOW]["epoch_1_s"] - local_start_s)
    return float((single[SLOW_STEP]["epoch_1_s"] - local_start_s) / limit_s)


def of_link(name: str) -> Callable[[Round, Result], float]:
    """The use of the link from the first to the last byte of a row."""
    return lambda single, result: float(
        single[name]["bytes"] / result["rate"] / single[name]["transfer_s"]
    )


def of_bytes(name: str, num_indexes: int) -> Callable[[Round, Result], float]:
    """The bytes sent for a row, against the tar and its index, once a node."""
    return lambda single, result: float(
        single[name]["bytes"] / (result["tar_bytes"] + num_indexes * result["index_bytes"])
    )


# The rows that a number needs, what it is, how it is made of one round, and its bound.
PROMISES = (
    Promise(
        {STREAM, FETCH},
        "first step, against our fetch and then training",
        lambda single, _: single[STREAM]["first_step_s"] / single[FETCH]["first_step_s"],
        at_most=0.25,
    ),
    Promise(
        {STREAM, LOCAL},
        "epoch 1 without the start, against the link, which is the limit",
        with_link_the_limit,
        at_most=1.05,
    ),
    Promise(
        {SLOW_STEP, LOCAL_SLOW},
        "epoch 1 without the start, where the compute is the limit, against a local tar's",
        with_local_the_limit,
        at_most=1.05,
    ),
    Promise(
        {SLOW_STEP, LOCAL_SLOW},
        "the same, against the sum of its steps' fixed times alone",
        with_compute_the_limit,
        at_most=1.05,
    ),
    Promise({STREAM}, "use of the link until the tar is whole", of_link(STREAM), at_least=0.90),
    Promise(
        {STREAM}, "bytes sent, against the tar and its index", of_bytes(STREAM, 1), at_most=1.02
    ),
    Promise(
        {SMALL_DISK},
        "use of the link over both epochs, with a disk of 15 % of the tar",
        of_link(SMALL_DISK),
        at_least=0.90,
    ),
    Promise(
        {TWO_NODES},
        "bytes sent to 2 nodes with disks of their own, against the tar and two indexes",
        of_bytes(TWO_NODES, 2),
        at_most=1.03,
    ),
    Promise(
        {STREAM, LOCAL},
        "speed of epoch 2, against a local tar",
        lambda single, _: single[LOCAL]["epoch_2_s"] / single[STREAM]["epoch_2_s"],
        at_least=0.97,
    ),
    Promise(
        {STREAM},
        f"modelled: first step of 148 GB, batch {REAL_BATCH}, {REAL_RATE / 1e6:.0f} MB/s",
        lambda single, result: model_first_step(single[STREAM], result),
        at_most=60,
        unit=" s",
    ),
)


def judge(result: Result) -> list[Target]:
    """All targets; those whose rows were not measured are left out."""
    targets = [
        promise.judge(result) for promise in PROMISES if promise.needs <= result["rows"].keys()
    ]
    if lost := result["lost_s"]:
        for name, bound in ((FETCHER, 5), (SILENT, 3)):
            targets.append(Target(f"{name}: lost", lost["lost"][name], bound, True, " s"))
    return targets


def model_first_step(row: dict[str, Any], result: dict[str, Any]) -> float:
    """Seconds to the first step of the real set at a slow link."""
    transfer_s = (result["index_bytes"] + row["first_bytes"]) / result["rate"]
    real_s = (INDEX_BYTES + result["real_first_bytes"]) / REAL_RATE
    return float(row["first_step_s"] - transfer_s + real_s)
