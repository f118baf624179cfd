#!/usr/bin/env python3
"""Makes small archives in the layout of ILSVRC2012, with learnable classes, for tests and demos."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dataset.packages import require_packages

require_packages("numpy", "PIL")

from dataset.errors import run_command
from dataset.fake.archives import SHAPES
from dataset.fake.draw import CountPictures
from dataset.fake.make import make_fake_imagenet

log = logging.getLogger("trainyard")
EXAMPLE = """example:
  python scripts/make_fake_imagenet.py --out demo/archives --classes 10 --train-per-class 100
"""


def main() -> int:
    """Parses the flags, makes the archives, says what was made."""
    args = _parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    start_s = time.monotonic()
    num_images = args.classes * (args.train_per_class + args.val_per_class)
    with _progress(num_images) as progress:
        made = make_fake_imagenet(
            args.out,
            classes=args.classes,
            train_per_class=args.train_per_class,
            val_per_class=args.val_per_class,
            size=args.size,
            shape=args.shape,
            seed=args.seed,
            oddities=args.oddities,
            processes=args.processes,
            progress=progress,
        )
    if made.was_there:
        log.info("%s: made before with the same flags, nothing to do", made.folder)
        return 0
    seconds = time.monotonic() - start_s
    log.info("%d images, mean %.1f KB, %.1f s", made.num_images, made.mean_bytes / 1e3, seconds)
    for name, size in made.files.items():
        log.info("  %s  %.1f MB", made.folder / name, size / 1e6)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the archives")
    parser.add_argument("--classes", type=int, default=10, help="number of classes, default 10")
    parser.add_argument("--train-per-class", type=int, default=50, help="images, default 50")
    parser.add_argument("--val-per-class", type=int, default=10, help="images, default 10")
    parser.add_argument(
        "--size",
        type=_size,
        default=(500, 375),
        help="mean WIDTHxHEIGHT in pixels, default 500x375",
    )
    parser.add_argument(
        "--shape",
        choices=SHAPES,
        default="nested",
        help="nested: a tar of class tars (as published, the default); tree: a tar of class "
        "folders; zip: Kaggle's layout",
    )
    parser.add_argument("--seed", type=int, default=0, help="same seed, same bytes; default 0")
    parser.add_argument(
        "--oddities",
        action="store_true",
        help="add a CMYK JPEG, a grey JPEG, and a PNG named .JPEG",
    )
    parser.add_argument("--processes", type=int, help="default: one per core")
    return parser


def _size(text: str) -> tuple[int, int]:
    try:
        width, height = (int(side) for side in text.lower().split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text} is not WIDTHxHEIGHT; give for example 500x375"
        ) from None
    return width, height


@contextmanager
def _progress(num_images: int) -> Iterator[CountPictures]:
    """A bar on a terminal, a line for each tenth elsewhere."""
    if sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(total=num_images, unit="image") as bar:
            yield bar.update
        return
    done = 0

    def count(num_new: int) -> None:
        nonlocal done
        if done * 10 // num_images != (done + num_new) * 10 // num_images:
            log.info("%d of %d images", done + num_new, num_images)
        done += num_new

    yield count


if __name__ == "__main__":
    sys.exit(run_command(main))
