"""Made-up sets in the shape of two published image workflows: class folders without val/."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dataset.errors import UserError
from dataset.fake.archives import TRAIN, check_range
from dataset.fake.draw import CountPictures, Item, open_drawer
from dataset.fake.make import MARKER, Made, choose_processes, read_marker, work_folder
from dataset.fake.picture import SIZE_SPREAD

FOLDER = "train"
MAX_IMAGES = 1_000_000
# This part of a class looks like another one: such pictures are a model's most confident mistakes.
MISLABELLED = 0.04


@dataclass(frozen=True)
class Alike:
    """The shape of a set: how many images each class has, and how large they are."""

    classes: Mapping[str, int]
    size: tuple[int, int]
    spread: float = SIZE_SPREAD


ALIKE = {
    # As many pictures of Galaxy Zoo 2 as the WORKS'21 workflow uses; the proportions are ours.
    "galaxy": Alike(
        {
            "cigar_shaped": 593,
            "edge_on": 4000,
            "in_between": 8000,
            "round": 8500,
            "spiral": 7700,
        },
        (424, 424),
        spread=0.0,
    ),
    # Photos of a crisis; here too, the proportion is ours.
    "crisis": Alike({"damaged": 1, "undamaged": 2}, (500, 375)),
}


def make_alike(
    out: Path,
    like: str,
    num_images: int,
    *,
    size: tuple[int, int] | None = None,
    seed: int = 0,
    processes: int | None = None,
    progress: CountPictures | None = None,
) -> Made:
    """out/train/CLASS/*.jpg, made once: a second call with the same values finds it there."""
    alike = ALIKE[like]
    size = size or alike.size
    if not len(alike.classes) <= num_images <= MAX_IMAGES:
        text = f"give {len(alike.classes)} to {MAX_IMAGES}"
        raise UserError(f"--images {num_images} is out of range; {text}")
    check_range(size, seed)
    num_processes = choose_processes(processes, num_images, size)
    spec = {"like": like, "images": num_images, "size": list(size), "seed": seed}
    found = _find_made(out, spec)
    if found:
        return found
    out.mkdir(parents=True, exist_ok=True)
    items = list_items(like, num_images, size, seed)
    num_bytes = 0
    with work_folder(out) as work:
        for name in alike.classes:
            (work / FOLDER / name).mkdir(parents=True)
        with open_drawer(num_processes, progress) as draw:
            for item, picture in draw(items):
                (work / FOLDER / item.name).write_bytes(picture.data)
                num_bytes += len(picture.data)
        marker = {"spec": spec, "files": {FOLDER: num_bytes}, "mean_bytes": num_bytes // len(items)}
        (work / MARKER).write_text(json.dumps(marker, indent=1) + "\n")
        for name in (MARKER, FOLDER):
            (work / name).replace(out / name)
    return Made(out, {FOLDER: num_bytes}, len(items), num_bytes / len(items), was_there=False)


def _find_made(out: Path, spec: Mapping[str, object]) -> Made | None:
    """What an earlier call with the same values left here; anything else in the way is refused."""
    is_there = (out / FOLDER).exists()
    if not (out / MARKER).exists():
        if is_there:
            raise UserError(f"{out / FOLDER} was not made by this command; give another --out")
        return None
    files, made_from, mean_bytes = read_marker(out)
    if made_from != spec:
        raise UserError(f"{out} holds another made-up set; remove it or give another --out")
    if not is_there:
        return None
    num_images = sum(1 for _ in (out / FOLDER).glob("*/*.jpg"))
    return Made(out, files, num_images, mean_bytes, was_there=True)


def list_items(like: str, num_images: int, size: tuple[int, int], seed: int) -> list[Item]:
    """The pictures, class by class; some have the look of another class."""
    alike = ALIKE[like]
    names = list(alike.classes)
    sizes = share_out(num_images, list(alike.classes.values()))
    rng = np.random.default_rng([seed, 7])
    items = []
    for label, (name, num) in enumerate(zip(names, sizes, strict=True)):
        shifts = rng.integers(1, len(names), size=num) * (rng.random(num) < MISLABELLED)
        items += [
            Item(
                f"{name}/{name}_{index:06d}.jpg",
                seed,
                TRAIN,
                (label + int(shift)) % len(names),
                label * num_images + index,  # a look never draws the same picture twice
                size,
                spread=alike.spread,
            )
            for index, shift in enumerate(shifts)
        ]
    return items


def share_out(num_images: int, weights: list[int]) -> list[int]:
    """So many images for each class in proportion to its weight, each at least one."""
    total = sum(weights)
    sizes = [max(1, num_images * weight // total) for weight in weights]
    sizes[int(np.argmax(weights))] += num_images - sum(sizes)
    return sizes
