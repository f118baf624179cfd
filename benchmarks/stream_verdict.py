"""What benchmarks/stream.py found: the tables of its result, and which targets were met.

The targets are those of the design of streaming. The first step of the real set is modelled: what
the measured first step cost beside its bytes, and the bytes that the real order needs at a slow
link.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.bench import Table, median
from benchmarks.order import BATCH as REAL_BATCH
from benchmarks.order import cut
from benchmarks.osg_week_model import INDEX_BYTES
from dataset.stream.spec import spread_needs
from dataset.transfer.journal import CHUNK
from dataset.words import count
from train.data.needs import HEADERS, find_uses
from train.data.sample_order import SampleOrder
from train.data.streamed_order import Layout, choose_window

CURL, FETCH, STREAM, LOCAL = "curl, then train", "our fetch, then train", "ours, streamed", "local"
SHUFFLED = "ours, streamed, all shuffled"  # the order as it is for a set that a window holds
SLOW_STEP = "ours, streamed, slower step"
PELICANFS, WEBDATASET, MOSAIC = "pelicanfs", "webdataset", "mosaicml-streaming"
FETCHER, SILENT = "the fetcher is killed", "a cache falls silent"
REAL_RATE = 40e6
MAX_FOREIGN = 0.2  # of the cores; above, a number says little
NOT_INSTALLED = "not installed"


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
        return [self.what, f"{self.reached:.2f}{self.unit}", bound, "yes" if self.is_met else "no"]


def middle(result: dict[str, Any], name: str, column: str) -> float:
    """The median over the rounds."""
    return median([row[column] for row in result["rows"][name]])


def of_rounds(result: dict[str, Any], value: Callable[[dict[str, dict[str, Any]]], float]) -> float:
    """The median over the rounds of a number that is made of the rows of one round."""
    rows = result["rows"]
    rounds = [dict(zip(rows, single, strict=True)) for single in zip(*rows.values(), strict=True)]
    return median([value(single) for single in rounds])


def judge(result: dict[str, Any]) -> list[Target]:
    """All targets; those whose rows were not measured are left out."""
    rows, link_s = result["rows"], result["link_s"]
    targets: list[Target] = []

    def add(needs: set[str], *fields: Any) -> None:
        what, value, bound, is_upper, *unit = fields
        if needs <= rows.keys():
            targets.append(Target(what, of_rounds(result, value), bound, is_upper, *unit))

    def streamed_s(single: dict[str, dict[str, Any]], name: str) -> float:
        """Epoch 1 without the start of Python and the trainer, which a local run has too."""
        start_s = single[LOCAL]["first_step_s"] - result["compute_s"] / result["steps"]
        return float(single[name]["epoch_1_s"] - start_s)

    add(
        {STREAM, FETCH},
        "first step, against our fetch and then training",
        lambda single: single[STREAM]["first_step_s"] / single[FETCH]["first_step_s"],
        0.25,
        True,
    )
    add(
        {STREAM, LOCAL},
        "epoch 1 without the start, against the link, which is the limit",
        lambda single: streamed_s(single, STREAM) / max(link_s, result["compute_s"]),
        1.05,
        True,
    )
    add(
        {SLOW_STEP, LOCAL},
        "epoch 1 without the start, against the compute, where that is the limit",
        lambda single: streamed_s(single, SLOW_STEP) / max(link_s, result["slow_compute_s"]),
        1.05,
        True,
    )
    add(
        {STREAM},
        "use of the link until the tar is whole",
        lambda single: link_s / single[STREAM]["transfer_s"],
        0.90,
        False,
    )
    add(
        {STREAM},
        "bytes sent, against the tar and its index",
        lambda single: single[STREAM]["bytes"] / (result["tar_bytes"] + result["index_bytes"]),
        1.02,
        True,
    )
    add(
        {STREAM, LOCAL},
        "speed of epoch 2, against a local tar",
        lambda single: single[LOCAL]["epoch_2_s"] / single[STREAM]["epoch_2_s"],
        0.97,
        False,
    )
    add(
        {STREAM},
        f"modelled: first step of 148 GB, batch {REAL_BATCH}, {REAL_RATE / 1e6:.0f} MB/s",
        lambda single: model_first_step(single[STREAM], result),
        60,
        True,
        " s",
    )
    if lost := result["lost_s"]:
        for name, bound in ((FETCHER, 5), (SILENT, 3)):
            targets.append(Target(f"{name}: lost", lost["lost"][name], bound, True, " s"))
    return targets


def model_first_step(row: dict[str, Any], result: dict[str, Any]) -> float:
    """Seconds to the first step of the real set at a slow link."""
    transfer_s = (result["index_bytes"] + row["first_bytes"]) / result["rate"]
    real_s = (INDEX_BYTES + result["real_first_bytes"]) / REAL_RATE
    return float(row["first_step_s"] - transfer_s + real_s)


def count_first_bytes() -> int:
    """What the first step of the real set needs, by the code that tells the fetcher."""
    units = cut()
    layout = Layout(units.unit, units.group, int(units.bounds[-1]))
    order = SampleOrder(layout, choose_window(layout, REAL_BATCH))
    uses = find_uses(order, 0, len(layout), REAL_BATCH, 0)
    offset = np.arange(len(layout)) * (112 << 10) + 512
    begin = np.maximum(0, offset - HEADERS)
    needs = spread_needs(begin, offset + 110_000, uses, int(units.bounds[-1]))
    return int((needs == 0).sum()) * CHUNK


def tables(result: dict[str, Any]) -> list[Table]:
    """The ways, the targets, and what a fault costs."""
    gb, rate = result["tar_bytes"] / 1e9, result["rate"] / 1e6
    title = (
        f"{gb:.2f} GB in {result['classes']} classes over a link of {rate:g} MB/s and "
        f"{1000 * result['rtt_s']:.0f} ms: {result['link_s']:.1f} s; "
        f"compute of an epoch: {result['compute_s']:.1f} s "
        f"({result['slow_compute_s']:.1f} s with the slower step), batches of {result['batch']}; "
        f"medians of {count(result['rounds'], 'round')}"
    )
    header = ["way", "conversion, s", "first step, s", "end of epoch 1, s", "epoch 2, s"]
    header += ["GB sent", "requests", "right after a flipped byte", "goes on after kill -9"]
    rows = [make_row(result, name) for name in result["rows"]]
    if not result["has_mosaic"]:
        rows.append([MOSAIC, NOT_INSTALLED, *[""] * 7])
    targets = [target.cells for target in judge(result)]
    found = [(title, header, rows)]
    found.append(("What was promised", ["what", "reached", "target", "met"], targets))
    if result["lost_s"]:
        found.append(make_lost(result["lost_s"]))
    return found


def make_row(result: dict[str, Any], name: str) -> list[str]:
    """One way; a row that others disturbed says so."""
    right = result["right"].get(name, {})
    foreign = max(row["others_share"] for row in result["rows"][name])
    note = f" (disturbed: {foreign:.0%})" if foreign > MAX_FOREIGN else ""
    conversion_s = middle(result, name, "conversion_s")
    has_second = result["rows"][name][0]["epoch_2_s"] is not None
    return [
        name + note,
        f"{conversion_s:.1f}" if conversion_s else "",
        f"{middle(result, name, 'first_step_s'):.1f}",
        f"{middle(result, name, 'epoch_1_s'):.1f}",
        f"{middle(result, name, 'epoch_2_s'):.1f}" if has_second else "",
        f"{middle(result, name, 'bytes') / 1e9:.2f}",
        f"{middle(result, name, 'requests'):.0f}",
        right.get("flip", ""),
        right.get("kill", ""),
    ]


def make_lost(lost: dict[str, Any]) -> Table:
    """Seconds that faults cost a streamed epoch."""
    seconds = lost["seconds"]
    rows = []
    for name, values in seconds.items():
        cost = f"{lost['lost'][name]:+.1f}" if name in lost["lost"] else ""
        rows.append([name, f"{median(values):.1f}", cost])
    title = (
        f"A streamed epoch from its first step to its last, with a fault when 40 % is here; "
        f"medians of {count(lost['rounds'], 'round')}"
    )
    return title, ["fault", "s", "lost, s"], rows
