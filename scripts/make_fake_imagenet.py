#!/usr/bin/env python3
"""Makes small archives in the layout of ILSVRC2012, with learnable classes, for tests and demos.

With --like it makes class folders in the shape of two image workflows instead, without val/.
"""

from __future__ import annotations

import logging
import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dataset.packages import require_packages

require_packages("numpy", "PIL")

from dataset.errors import UserError, run_command
from dataset.fake.alike import ALIKE, make_alike
from dataset.fake.archives import SHAPES
from dataset.fake.draw import CountPictures
from dataset.fake.make import DEFAULT_SIZE, Made, make_fake_imagenet
from dataset.flags import REQUIRED, flag, make_parser, parse_flags

log = logging.getLogger("trainyard")
EXAMPLE = """examples:
  python scripts/make_fake_imagenet.py --out demo/archives --classes 10 --train-per-class 100
  python scripts/make_fake_imagenet.py --out demo/galaxy --like galaxy --images 600
"""


def _size(text: str) -> tuple[int, int]:
    try:
        width, height = (int(side) for side in text.lower().split("x"))
    except ValueError:
        raise ArgumentTypeError(f"{text} is not WIDTHxHEIGHT; give for example 500x375") from None
    return width, height


OF_ARCHIVES = ("classes", "train_per_class", "val_per_class", "shape", "oddities")
OF_LIKE = ("images",)


@dataclass(frozen=True, kw_only=True)
class FakeFlags:
    """The flags of scripts/make_fake_imagenet.py."""

    out: Path = flag(REQUIRED, "folder for the archives")
    classes: int = flag(10, "number of classes, default 10")
    train_per_class: int = flag(50, "images, default 50")
    val_per_class: int = flag(10, "images, default 10")
    size: tuple[int, int] | None = flag(
        None, "mean WIDTHxHEIGHT in pixels, default 500x375; with --like the set's", type=_size
    )
    shape: str = flag(
        "nested",
        "nested: a tar of class tars (as published, the default); tree: a tar of class "
        "folders; zip: Kaggle's layout",
        choices=SHAPES,
    )
    like: str | None = flag(
        None,
        "galaxy: 424x424 pixels, 5 unbalanced classes; crisis: damaged and undamaged",
        choices=tuple(ALIKE),
    )
    images: int = flag(1000, "of all classes with --like, default 1000")
    seed: int = flag(0, "same seed, same bytes; default 0")
    oddities: bool = flag(False, "add a CMYK JPEG, a grey JPEG, and a PNG named .JPEG")
    processes: int | None = flag(None, "default: one per core")

    def __post_init__(self) -> None:
        used = [spec.name for spec in fields(self) if getattr(self, spec.name) != spec.default]
        strange = [name for name in used if name in (OF_ARCHIVES if self.like else OF_LIKE)]
        if strange:
            reason = "is for archives; leave it out with --like" if self.like else "needs --like"
            raise UserError(f"--{strange[0].replace('_', '-')} {reason}")

    @property
    def num_images(self) -> int:
        if self.like:
            return self.images
        return self.classes * (self.train_per_class + self.val_per_class)


def main() -> int:
    """Parses the flags, makes the archives, says what was made."""
    flags = parse_flags(FakeFlags, make_parser(__doc__, EXAMPLE))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    start_s = time.monotonic()
    with _progress(flags.num_images) as progress:
        made = _make(flags, progress)
    if made.was_there:
        log.info("%s: made before with the same flags, nothing to do", made.folder)
        return 0
    seconds = time.monotonic() - start_s
    log.info("%d images, mean %.1f KB, %.1f s", made.num_images, made.mean_bytes / 1e3, seconds)
    for name, size in made.files.items():
        log.info("  %s  %.1f MB", made.folder / name, size / 1e6)
    return 0


def _make(flags: FakeFlags, progress: CountPictures) -> Made:
    if flags.like:
        return make_alike(
            flags.out,
            flags.like,
            flags.images,
            size=flags.size,
            seed=flags.seed,
            processes=flags.processes,
            progress=progress,
        )
    return make_fake_imagenet(
        flags.out,
        classes=flags.classes,
        train_per_class=flags.train_per_class,
        val_per_class=flags.val_per_class,
        size=flags.size or DEFAULT_SIZE,
        shape=flags.shape,
        seed=flags.seed,
        oddities=flags.oddities,
        processes=flags.processes,
        progress=progress,
    )


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
