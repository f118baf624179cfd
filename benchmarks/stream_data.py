"""The data of benchmarks/stream.py: a tar of the real one's shape, and the two ways to rewrite it.

Its images are of 64 pixels, so that two cores can decode them beside a server. Random bytes behind
each image, where no decoder looks, make it as large as a photograph.
"""

from __future__ import annotations

import io
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.bench import CACHE
from dataset.archive.index import build_index
from dataset.archive.index_file import TarIndex, load_index_alone
from dataset.names import INDEX_SUFFIX, TRAIN_TAR

PIXELS, QUALITY, NOISE = 64, 90, 16
SIGMA = 0.4  # of the logarithm of an image's size
SHARD_BYTES, MIN_SHARDS = 1 << 25, 8
SEED = 7


@dataclass(frozen=True)
class StreamSet:
    """A tar of `classes` class tars, with its index; made once and kept."""

    classes: int
    per_class: int
    num_bytes: int  # of all images, about

    @property
    def folder(self) -> Path:
        return CACHE / f"stream-{self.classes}-{self.per_class}-{self.num_bytes}"

    @property
    def tar(self) -> Path:
        return self.folder / TRAIN_TAR

    @property
    def index(self) -> Path:
        return self.folder / (TRAIN_TAR + INDEX_SUFFIX)

    def make(self) -> None:
        """Writes the tar and its index with checksums, if they are not there."""
        if self.index.exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.tar.with_name(self.tar.name + ".part")
        with tarfile.open(part, "w") as outer:
            for label in range(self.classes):
                content = self._make_class(label)
                info = tarfile.TarInfo(f"n{90_000_001 + label}.tar")
                info.size = len(content)
                outer.addfile(info, io.BytesIO(content))
        part.replace(self.tar)
        build_index(self.tar, checksums=True)

    def _make_class(self, label: int) -> bytes:
        chance = np.random.default_rng([SEED, label])
        sizes = np.exp(SIGMA * chance.standard_normal(self.per_class))
        sizes *= self.num_bytes / self.classes / sizes.sum()
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as tar:
            for number, size in enumerate(sizes.astype(int).tolist()):
                image = draw_image(chance)
                content = image + chance.bytes(max(0, size - len(image)))
                info = tarfile.TarInfo(f"n{90_000_001 + label}_{number}.JPEG")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        return file.getvalue()


def draw_image(chance: np.random.Generator) -> bytes:
    """A JPEG of a coarse noise."""
    coarse = chance.integers(0, 256, (NOISE, NOISE, 3), np.uint8)
    file = io.BytesIO()
    image = Image.fromarray(coarse).resize((PIXELS, PIXELS), Image.Resampling.BILINEAR)
    image.save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def read_samples(tar: Path, numbers: list[int] | None = None) -> Iterator[tuple[int, bytes]]:
    """Label and bytes of each image, in the order of the numbers."""
    index = load_index(tar)
    with open(tar, "rb") as file:
        for number in range(len(index.label)) if numbers is None else numbers:
            file.seek(int(index.offset[number]))
            yield int(index.label[number]), file.read(int(index.size[number]))


def load_index(tar: Path) -> TarIndex:
    """The index beside a tar."""
    return load_index_alone(tar.with_name(tar.name + INDEX_SUFFIX))


def shuffled(num_samples: int) -> list[int]:
    """The order in which both rewritten sets have the images: shards of one class train badly."""
    order: list[int] = np.random.default_rng(SEED).permutation(num_samples).tolist()
    return order


def choose_shard(tar: Path) -> int:
    """Bytes of a shard: a small set has several, too."""
    return min(SHARD_BYTES, tar.stat().st_size // MIN_SHARDS)


def convert_to_webdataset(tar: Path, out: Path) -> None:
    """Shards of webdataset, in a random order."""
    writer = import_module("webdataset").ShardWriter
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    order = shuffled(len(load_index(tar).label))
    with writer(str(out / "%05d.tar"), maxsize=choose_shard(tar), verbose=0) as sink:
        for number, (label, image) in zip(order, read_samples(tar, order), strict=True):
            sink.write({"__key__": f"{number:08d}", "jpg": image, "cls": label})


def convert_to_mds(tar: Path, out: Path) -> None:
    """Shards of mosaicml-streaming, in a random order."""
    streaming: Any = import_module("streaming")
    shutil.rmtree(out, ignore_errors=True)
    columns = {"image": "bytes", "label": "int"}
    order = shuffled(len(load_index(tar).label))
    with streaming.MDSWriter(out=str(out), columns=columns, size_limit=choose_shard(tar)) as sink:
        for label, image in read_samples(tar, order):
            sink.write({"image": image, "label": label})
