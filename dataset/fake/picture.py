"""Pictures for the fake ImageNet: a photo-like spectrum, and classes that a network can learn."""

from __future__ import annotations

import colorsys
import io
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from PIL import Image

Floats = npt.NDArray[np.float32]

SIZE_SPREAD = 0.25  # each side of a picture is within +-25 % of the mean, as ImageNet's vary
NUM_TILES = 3
# Tuned for 90-130 KB at 500x375, the mean of ILSVRC2012's training set (115 KB a picture).
NOISE_CONTRAST = 30.0
GRAIN = 7.0  # sensor noise: what makes a photo cost its bytes


@dataclass(frozen=True)
class Picture:
    """An encoded picture, its size, and the box (x0, y0, x1, y1) of the object in it."""

    data: bytes
    width: int
    height: int
    box: tuple[int, int, int, int]


@dataclass(frozen=True)
class ClassLook:
    """What the pictures of one class share: two colours, a stripe pattern, an outline."""

    hue: float
    second_hue: float
    num_stripes: float
    angle: float
    exponent: float  # of the superellipse: 1 is a diamond, 2 an ellipse, 6 nearly a box


def look_of_class(seed: int, label: int) -> ClassLook:
    """The look of a class; neighbouring labels get hues far apart (the golden ratio's steps)."""
    rng = np.random.default_rng([seed, 1, label])
    hue = (label * 0.618034 + seed * 0.37) % 1.0
    return ClassLook(
        hue=hue,
        second_hue=(hue + rng.choice([0.25, 0.4, 0.5])) % 1.0,
        num_stripes=float(rng.uniform(2, 9)),
        angle=float(rng.uniform(0, np.pi)),
        exponent=float(rng.choice([1.0, 2.0, 6.0])),
    )


def draw_picture(
    seed: int,
    split: int,
    label: int,
    number: int,
    mean_size: tuple[int, int],
    kind: str = "JPEG",
    spread: float = SIZE_SPREAD,
) -> Picture:
    """One picture, a function of its arguments alone; kind: JPEG, CMYK, GREY or PNG."""
    rng = np.random.default_rng([seed, 2, split, label, number])
    width, height = (round(s * rng.uniform(1 - spread, 1 + spread)) for s in mean_size)
    pixels, box = _paint(
        rng, look_of_class(seed, label), _noise_tiles(seed, mean_size), width, height
    )
    return Picture(_encode(rng, pixels, kind), width, height, box)


def _paint(
    rng: np.random.Generator, look: ClassLook, tiles: Floats, width: int, height: int
) -> tuple[npt.NDArray[np.uint8], tuple[int, int, int, int]]:
    """The pixels of a picture: a striped object before a background, both textured."""
    x = np.linspace(0, 1, width, dtype=np.float32)[None, :]
    y = np.linspace(0, 1, height, dtype=np.float32)[:, None]
    cx, cy = rng.uniform(0.4, 0.6, size=2)
    rx, ry = rng.uniform(0.3, 0.5, size=2)
    distance = np.abs((x - cx) / rx) ** look.exponent + np.abs((y - cy) / ry) ** look.exponent
    mask = np.clip((1.1 - distance) * 8, 0, 1) * np.float32(rng.uniform(0.55, 0.85))

    angle = look.angle + rng.normal(0, 0.1)
    frequency = 2 * np.pi * look.num_stripes * rng.uniform(0.85, 1.15)
    phase = np.float32(frequency * np.cos(angle)) * x + np.float32(frequency * np.sin(angle)) * y
    stripes = 0.5 + 0.5 * np.sin(phase + np.float32(rng.uniform(0, 2 * np.pi)))

    texture = _crop(rng, tiles, width, height) * np.float32(NOISE_CONTRAST * rng.uniform(0.7, 1.3))
    # One number for each pixel instead of three: the grain of a photo is mostly brightness.
    texture += rng.standard_normal((height, width), dtype=np.float32) * np.float32(GRAIN)
    tint = _crop(rng, tiles, width, height) * np.float32(12.0)
    background = rng.uniform(70, 180, size=3).astype(np.float32)
    first, second = _colours(rng, look)
    pixels = np.empty((height, width, 3), dtype=np.uint8)
    for channel, tint_sign in enumerate((1.0, -0.3, -1.0)):
        object_colour = second[channel] + (first[channel] - second[channel]) * stripes
        plane = background[channel] + (object_colour - background[channel]) * mask
        plane += texture
        plane += tint * np.float32(tint_sign)
        pixels[..., channel] = np.clip(plane, 0, 255, out=plane)
    corners = ((cx - rx) * width, (cy - ry) * height, (cx + rx) * width, (cy + ry) * height)
    return pixels, _clip_box(corners, width, height)


def _colours(rng: np.random.Generator, look: ClassLook) -> tuple[Floats, Floats]:
    """The two colours of the object, with the jitter of lighting."""
    value = rng.uniform(0.7, 1.0)
    hues = np.array([look.hue, look.second_hue]) + rng.normal(0, 0.02, size=2)
    saturation = rng.uniform(0.55, 0.9)
    first, second = (
        np.array(colorsys.hsv_to_rgb(h % 1.0, saturation, value), dtype=np.float32) * 255
        for h in hues
    )
    return first, second


def _clip_box(
    corners: tuple[float, float, float, float], width: int, height: int
) -> tuple[int, int, int, int]:
    """Whole pixels inside the picture, as the boxes of LOC_val_solution.csv are."""
    x0, y0, x1, y1 = (round(c) for c in corners)
    return max(0, x0), max(0, y0), min(width - 1, x1), min(height - 1, y1)


def _encode(rng: np.random.Generator, pixels: npt.NDArray[np.uint8], kind: str) -> bytes:
    """The file's bytes, with the qualities and subsamplings that a crawl of the web brings."""
    image = Image.fromarray(pixels)
    quality = int(rng.integers(86, 95))
    subsampling = 0 if rng.random() < 0.3 else 2  # 4:4:4 or 4:2:0
    buffer = io.BytesIO()
    if kind == "PNG":
        image.save(buffer, "PNG", compress_level=1)
    elif kind == "GREY":
        image.convert("L").save(buffer, "JPEG", quality=quality)
    elif kind == "CMYK":
        image.convert("CMYK").save(buffer, "JPEG", quality=quality)
    else:
        image.save(buffer, "JPEG", quality=quality, subsampling=subsampling)
    return buffer.getvalue()


def _crop(rng: np.random.Generator, tiles: Floats, width: int, height: int) -> Floats:
    """A random window of a random tile, mirrored at random; a view, never written to."""
    tile = tiles[rng.integers(len(tiles))]
    side = tile.shape[0]
    top, left = rng.integers(side - height + 1), rng.integers(side - width + 1)
    flip_y, flip_x = (int(s) for s in rng.choice([-1, 1], size=2))
    window: Floats = tile[top : top + height, left : left + width][::flip_y, ::flip_x]
    return window


@lru_cache(maxsize=2)
def _noise_tiles(seed: int, mean_size: tuple[int, int]) -> Floats:
    """Square tiles of unit variance whose amplitude falls as 1/f, as in photos of the world."""
    largest = max(mean_size) * (1 + SIZE_SPREAD) + 1
    side = 1 << int(np.ceil(np.log2(max(largest * 1.5, 64))))
    rng = np.random.default_rng([seed, 3])
    fy = np.fft.fftfreq(side)[:, None]
    fx = np.fft.rfftfreq(side)[None, :]
    radius = np.hypot(fx, fy)
    radius[0, 0] = np.inf  # no mean
    tiles = np.empty((NUM_TILES, side, side), dtype=np.float32)
    for tile in tiles:
        white = np.fft.rfft2(rng.standard_normal((side, side)))
        noise = np.fft.irfft2(white / radius, s=(side, side))
        tile[:] = noise / noise.std()
    return tiles
