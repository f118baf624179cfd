"""What an evaluation writes of its images: predictions.csv and mistakes.jsonl (no torch)."""

from __future__ import annotations

import base64
import csv
import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

from dataset.durable import writing_whole

NAMES_AT_ONCE = 4096
JPEG_QUALITY = 80


class NamedImages(Protocol):
    """Images with names and labels, as every source of images has them."""

    labels: npt.NDArray[np.int64]

    def __len__(self) -> int: ...
    def raw_names(self, start: int, end: int) -> list[bytes]: ...


@dataclass(frozen=True)
class Mistake:
    """An image whose best class is wrong, and a small picture of it."""

    name: str
    label: str
    predicted: str
    probability: float
    jpeg: bytes


def write_predictions(
    path: Path,
    images: NamedImages,
    class_names: Sequence[str],
    classes: npt.NDArray[np.int32],
    probabilities: npt.NDArray[np.float32],
) -> None:
    """One row for each image in the order of the set; without a prediction if it was skipped."""
    header = ["name", "label"]
    for place in range(1, classes.shape[1] + 1):
        header += [f"top{place}", f"p{place}"]
    with writing_whole(path, is_shared=True) as file:
        # A name may hold bytes that are no UTF-8: they stay what they are.
        text = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="", write_through=True)
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(header)
        for start in range(0, len(images), NAMES_AT_ONCE):
            end = min(start + NAMES_AT_ONCE, len(images))
            names = map(os.fsdecode, images.raw_names(start, end))
            labels = images.labels[start:end].tolist()
            found = _describe(classes[start:end], probabilities[start:end], class_names)
            for name, label, cells in zip(names, labels, found, strict=True):
                writer.writerow([name, class_names[label], *cells])
        text.detach()


def _describe(
    classes: npt.NDArray[np.int32], probabilities: npt.NDArray[np.float32], names: Sequence[str]
) -> Iterator[list[str]]:
    """The cells of each image from its best class on; empty ones for a skipped image."""
    for best, shares in zip(classes.tolist(), probabilities.tolist(), strict=True):
        if best[0] < 0:
            yield [""] * (2 * len(best))
            continue
        pairs = zip(best, shares, strict=True)
        yield [cell for place, share in pairs for cell in (names[place], f"{share:.6f}")]


def write_mistakes(path: Path, mistakes: Sequence[Mistake]) -> None:
    """A line for each, the most confident first."""
    with writing_whole(path, is_shared=True) as file:
        for mistake in sorted(mistakes, key=lambda m: (-m.probability, m.name)):
            line = vars(mistake) | {"jpeg": base64.b64encode(mistake.jpeg).decode()}
            file.write(json.dumps(line, allow_nan=False).encode() + b"\n")


def encode_jpeg(pixels: npt.NDArray[np.uint8]) -> bytes:
    """The bytes of a small picture."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=JPEG_QUALITY)
    return buffer.getvalue()
