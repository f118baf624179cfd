"""Damaged JPEGs and odd boxes for the kernel; also a program of its own, for sanitizers."""

from __future__ import annotations

import io
import random
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from train.data.jpeg import Kernel


def make_picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth colours with edges and noise: what subsampling and filters can get wrong."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8)
    smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    noisy = np.asarray(smooth).astype(int) + rng.normal(0, 8, (height, width, 3))
    noisy[height // 3 : height // 2, width // 4 : width // 2] = (250, 10, 30)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def to_jpeg(picture: Image.Image, **options: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, "JPEG", **({"quality": 90} | options))
    return file.getvalue()


def fuzz(kernel: Kernel, num_images: int) -> int:
    """How many of the damaged images the kernel took; none may crash it."""
    whole = [
        to_jpeg(make_picture(160, 120), subsampling=subsampling, progressive=progressive)
        for subsampling in (0, 2)
        for progressive in (False, True)
    ]
    rng = random.Random(1)
    num_taken = 0
    for _ in range(num_images):
        data = damage(rng.choice(whole), rng)
        size = kernel.size(data)
        if size:
            num_taken += 1
            kernel.decode(data, *choose_window(size, rng))
    return num_taken


def damage(data: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(data)
    for _ in range(rng.randint(1, 20)):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    return bytes(damaged)


def choose_window(
    size: tuple[int, int], rng: random.Random
) -> tuple[tuple[int, int, int, int], tuple[int, int], tuple[int, int], bool, np.ndarray]:
    """A box inside or, rarely, outside of the image; a resize of it; a square of that."""
    width, height = rng.randint(1, min(size[0], 400)), rng.randint(1, min(size[1], 400))
    slack = 2 if rng.random() < 0.1 else 0
    box = (
        rng.randint(-slack, size[0] - width + slack),
        rng.randint(-slack, size[1] - height + slack),
        width,
        height,
    )
    side = rng.choice([1, 7, 32, 64])
    full = (side + rng.randint(0, 40), side + rng.randint(0, 40))
    corner = (rng.randint(0, full[0] - side), rng.randint(0, full[1] - side))
    out = np.empty((side, side, 3), dtype=np.uint8)
    return box, full, corner, rng.random() < 0.5, out


if __name__ == "__main__":
    assert fuzz(Kernel(Path(sys.argv[1])), num_images=400) > 100
