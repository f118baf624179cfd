#!/usr/bin/env python3
"""Makes small archives in the layout of ILSVRC2012, with learnable classes, for tests and demos."""

from __future__ import annotations

import logging
import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dataset.packages import require_packages

require_packages("numpy", "PIL")

from dataset.errors import run_command
from dataset.fake.archives import SHAPES
from dataset.fake.draw import CountPictures
from dataset.fake.make import make_fake_imagenet
from dataset.flags import REQUIRED, flag, make_parser, parse_flags

log = logging.getLogger("trainyard")
EXAMPLE = """example:
  python scripts/make_fake_imagenet.py --out demo/archives --classes 10 --train-per-class 100
"""


def _size(text: str) -> tuple[int, int]:
    try:
        width, height = (int(side) for side in text.lower().split("x"))
    except ValueError:
        raise ArgumentTypeError(f"{text} is not WIDTHxHEIGHT; give for example 500x375") from None
    return width, height


@dataclass(frozen=True, kw_only=True)
class FakeFlags:
    """The flags of scripts/make_fake_imagenet.py."""

    out: Path = flag(REQUIRED, "folder for the archives")
    classes: int = flag(10, "number of classes, default 10")
    train_per_class: int = flag(50, "images, default 50")
    val_per_class: int = flag(10, "images, default 10")
    size: tuple[int, int] = flag(
        (500, 375), "mean WIDTHxHEIGHT in pixels, default 500x375", type=_size
    )
    shape: str = flag(
        "nested",
        "nested: a tar of class tars (as published, the default); tree: a tar of class "
        "folders; zip: Kaggle's layout",
        choices=SHAPES,
    )
    seed: int = flag(0, "same seed, same bytes; default 0")
    oddities: bool = flag(False, "add a CMYK JPEG, a grey JPEG, and a PNG named .JPEG")
    processes: int | None = flag(None, "default: one per core")

    @property
    def num_images(self) -> int:
        return self.classes * (self.train_per_class + self.val_per_class)


def main() -> int:
    """Parses the flags, makes the archives, says what was made."""
    flags = parse_flags(FakeFlags, make_parser(__doc__, EXAMPLE))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    start_s = time.monotonic()
    with _progress(flags.num_images) as progress:
        made = make_fake_imagenet(
            flags.out,
            classes=flags.classes,
            train_per_class=flags.train_per_class,
            val_per_class=flags.val_per_class,
            size=flags.size,
            shape=flags.shape,
            seed=flags.seed,
            oddities=flags.oddities,
            processes=flags.processes,
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
