"""The tables of benchmarks/stream.py: the ways, the promises, the model of the real set."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.bench import Table, describe_disturbance, median
from benchmarks.order import BATCH as REAL_BATCH
from benchmarks.order import cut
from benchmarks.stream_promises import MOSAIC, ONCE, judge
from dataset.stream.spec import Needs, spread_needs
from dataset.transfer.journal import CHUNK
from dataset.words import count
from train.data.needs import HEADERS, find_uses
from train.data.sample_order import SampleOrder
from train.data.streamed_order import Layout, choose_window

REAL_COMPUTES = (0.5, 0.75, 1.0, 1.25, 1.5)  # of an epoch, in times of the link for the tar
NOT_INSTALLED = "not installed"


def middle(result: dict[str, Any], name: str, column: str) -> float:
    """The median over the rounds."""
    return median([row[column] for row in result["rows"][name]])


def find_real_needs() -> tuple[Needs, int]:
    """The step that first needs each MiB of the real set, and the steps of its epoch.

    By the code that tells the fetcher, for images that are all of one size.
    """
    units = cut()
    layout = Layout(units.unit, units.group, int(units.bounds[-1]))
    order = SampleOrder(layout, choose_window(layout, REAL_BATCH))
    uses = find_uses(order, 0, len(layout), REAL_BATCH, 0)
    offset = np.arange(len(layout)) * (112 << 10) + 512
    begin = np.maximum(0, offset - HEADERS)
    needs = spread_needs(begin, offset + 110_000, uses, int(units.bounds[-1]))
    return needs, len(layout) // REAL_BATCH


def model_real_set() -> dict[str, Any]:
    """Bytes before the first step of the real set, and how long its streamed epoch is.

    The latter in times of max(link, compute), by compute / link: step k begins when the step
    before it has ended and all MiB that are needed until then have come.
    """
    needs, steps = find_real_needs()
    come = np.cumsum(np.bincount(needs[needs < steps], minlength=steps)) / len(needs)
    behind = np.arange(steps, 0, -1) / steps  # of the epoch's compute, from step k on
    epochs = {
        str(compute): float(np.max(come + compute * behind)) / max(1.0, compute)
        for compute in REAL_COMPUTES
    }
    return {"real_first_bytes": int((needs == 0).sum()) * CHUNK, "real_epochs": epochs}


def tables(result: dict[str, Any]) -> list[Table]:
    """The ways, the targets, and what a fault costs."""
    gb, rate = result["tar_bytes"] / 1e9, result["rate"] / 1e6
    title = (
        f"{gb:.2f} GB in {result['classes']} classes over a link of {rate:g} MB/s and "
        f"{1000 * result['rtt_s']:.0f} ms: {result['link_s']:.1f} s; "
        f"compute of an epoch: {result['compute_s']:.1f} s "
        f"({result['slow_compute_s']:.1f} s with the slower step), batches of {result['batch']}; "
        f"medians of {count(result['rounds'], 'round')}, of the rows without a target "
        f"{count(min(result['rounds'], ONCE), 'round')}"
    )
    header = ["way", "conversion, s", "first step, s", "end of epoch 1, s", "epoch 2, s"]
    header += ["GB sent", "requests", "right after a flipped byte", "goes on after kill -9"]
    rows = [make_row(result, name) for name in result["rows"]]
    if not result["has_mosaic"]:
        rows.append([MOSAIC, NOT_INSTALLED, *[""] * 7])
    targets = [target.cells for target in judge(result)]
    found = [(title, header, rows)]
    found.append(("What was promised", ["what", "reached", "target", "met"], targets))
    found.append(make_real(result["real_epochs"]))
    if result["lost_s"]:
        found.append(make_lost(result["lost_s"]))
    return found


def note_disturbed(result: dict[str, Any], name: str) -> str:
    """For a row that others disturbed in every try of a round: how much of the cores they took."""
    return describe_disturbance(row["others_share"] for row in result["rows"][name])


def make_row(result: dict[str, Any], name: str) -> list[str]:
    """One way."""
    right = result["right"].get(name, {})
    conversion_s = middle(result, name, "conversion_s")
    has_second = result["rows"][name][0]["epoch_2_s"] is not None
    return [
        name + note_disturbed(result, name),
        f"{conversion_s:.1f}" if conversion_s else "",
        f"{middle(result, name, 'first_step_s'):.1f}",
        f"{middle(result, name, 'epoch_1_s'):.1f}",
        f"{middle(result, name, 'epoch_2_s'):.1f}" if has_second else "",
        f"{middle(result, name, 'bytes') / 1e9:.2f}",
        f"{middle(result, name, 'requests'):.0f}",
        right.get("flip", ""),
        right.get("kill", ""),
    ]


def make_real(epochs: dict[str, float]) -> Table:
    """How much of the real set's transfer is hidden, by how fast the computing is."""
    rows = [
        [
            f"{float(compute):g}",
            f"{times:.2f}",
            f"{(1 + float(compute)) / max(1, float(compute)):.2f}",
        ]
        for compute, times in epochs.items()
    ]
    title = (
        f"Modelled: epoch 1 of 148 GB with batches of {REAL_BATCH}, in times of the slower of link "
        "and compute. Neighbouring units share a MiB, which comes with the first of them: that "
        "costs most where link and compute are equal"
    )
    return title, ["compute / link", "streamed", "fetched, then trained"], rows


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
