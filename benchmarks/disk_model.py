"""Which disk gives which speed: a model of --cache-limit on ImageNet, by the trainer's own plans.

    python benchmarks/disk_model.py --write      fills the table of docs/grid.md

A layout of ImageNet's size is planned as the trainer plans it: batches of 256 in the streamed
order. What is kept, and so what each later epoch fetches, follows from the limit. The speed is the
link's, or that of the GPU where the link is not the limit. Nothing is measured here.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench import ROOT
from benchmarks.extract_doc import fill, table
from benchmarks.order import BATCH, cut
from dataset.errors import run_command
from dataset.flags import flag, make_parser, parse_flags
from dataset.stream.spec import StreamSpec
from train.data.sample_order import order_along
from train.data.streamed_order import Layout
from train.data.unit_needs import CacheShare, RunSteps, UnitNeeds, share_cache

NAME = "disk_model"
DOC = ROOT / "docs" / "grid.md"
CACHES_GB, RATES_MB = (12, 15, 20, 50, 100, 150), (40, 70)
GB = 1 << 30  # as HTCondor counts
OTHER_GB = 3  # beside the cache, in a slot with little disk
VAL_BYTES = 6_744_924_160  # ILSVRC2012_img_val.tar
GPU_IMAGES = 571  # a second: a job of CHTC in the OSG study


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """The flags of benchmarks/disk_model.py."""

    write: bool = flag(False, "write the table into docs/grid.md")


def main() -> int:
    flags = parse_flags(ModelFlags, make_parser(__doc__))
    part = make_part()
    print(part)
    if flags.write:
        DOC.write_text(fill(DOC.read_text(), NAME, part))
    return 0


def plan_caches() -> tuple[list[CacheShare], int]:
    """How each cache is divided, and the images of the set."""
    units = cut()
    layout = Layout(units.unit, units.group, int(units.bounds[-1]))
    order = order_along(layout, units.digest, BATCH, None)
    per_epoch = len(layout) // BATCH
    needs = UnitNeeds(RunSteps(order, 0, BATCH, 0, 2 * per_epoch), units)
    plans = [needs.plan(0), needs.plan(1)]

    def divide(limit: int) -> CacheShare:
        return share_cache(limit, VAL_BYTES, units, plans, StreamSpec.connections, is_part=False)

    return [divide(cache_gb * GB) for cache_gb in CACHES_GB], len(layout)


def make_part() -> str:
    """The table, and what it assumes."""
    shares, num_images = plan_caches()
    head = ["`CACHE_GB`", "cache limit, 10^9 bytes"]
    head += [f"disk of the slot with `OTHER_GB={OTHER_GB}`, GB", "kept"]
    head += ["fetched by each later epoch, 10^9 bytes"]
    head += [f"images/s at {rate} MB/s" for rate in RATES_MB]
    rows = [
        [
            f"{cache_gb}",
            f"{share.limit / 1e9:.1f}",
            f"{cache_gb + OTHER_GB}",
            f"{share.keep / share.total:.0%}",
            f"{share.later / 1e9:.0f}",
            *(f"{find_speed(share.later, num_images, rate * 1e6):.0f}" for rate in RATES_MB),
        ]
        for cache_gb, share in zip(CACHES_GB, shares, strict=True)
    ]
    least = min(shares, key=lambda share: share.limit)
    return "\n\n".join(
        [
            table(head, rows),
            "A model, not a measurement: `python benchmarks/disk_model.py --write`. GB are 2^30 "
            "bytes here, as HTCondor counts.\n"
            f"The tar has {least.total / 1e9:.0f}·10^9 bytes. The least limit is "
            f"{least.least / 1e9:.1f}·10^9, or {least.least / GB:.2f} GB, with "
            f"{VAL_BYTES / 1e9:.1f}·10^9 of validation images. A\n"
            f"GPU of {GPU_IMAGES} images/s, as in the jobs of CHTC, is the upper bound. The first "
            "epoch fetches the whole tar.",
        ]
    )


def find_speed(num_bytes: int, num_images: int, rate: float) -> float:
    """Images a second of an epoch that fetches so many bytes while it trains."""
    return num_images / max(num_bytes / rate, num_images / GPU_IMAGES)


if __name__ == "__main__":
    sys.exit(run_command(main))
