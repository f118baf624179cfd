"""A tar that arrives MiB by MiB, as a test brings it; and the small set in tars of several MiB."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from dataset.archive.index import build_index
from dataset.archive.index_file import TarIndex
from dataset.own_names import part_path
from dataset.stream.arrivals import ArrivalMap
from dataset.transfer.journal import CHUNK
from tests.dataset.tars import TRAIN, VAL, Tree, flatten, nested_bytes, tar_bytes
from train.data.network_meter import NetworkMeter
from train.data.stream_source import StreamSource

PADDING = 150_000  # behind each image, where no decoder looks: 7 images a MiB


def write_padded(images: Path, folder: Path) -> Path:
    """The small set as two tars: 42 and 35 images in 6.5 and 5.4 MiB."""
    folder.mkdir()
    (folder / TRAIN).write_bytes(nested_bytes(_read_padded(images / "train")))
    (folder / VAL).write_bytes(tar_bytes(flatten(_read_padded(images / "val"))))
    return folder


def write_indexed(images: Path, folder: Path) -> Path:
    """The same with their indexes beside them, as an origin would have them."""
    write_padded(images, folder)
    for name in (TRAIN, VAL):
        build_index(folder / name, checksums=True)
    return folder


def _read_padded(split: Path) -> Tree:
    noise = np.random.default_rng(0)
    return {
        wnid.name: {
            file.name: file.read_bytes() + noise.bytes(PADDING) for file in sorted(wnid.iterdir())
        }
        for wnid in sorted(split.iterdir())
    }


class Arriving:
    """The partial file of a tar, full of holes, its map, and what a fetcher would do to both."""

    def __init__(self, tar: Path, folder: Path, index: TarIndex | None = None) -> None:
        folder.mkdir(exist_ok=True)
        self.data = tar.read_bytes()
        self.path = folder / tar.name
        self.part = part_path(self.path)
        with open(self.part, "wb") as file:
            file.truncate(len(self.data))
        index = index or build_index(tar, index_dir=folder, checksums=True)[0]
        self.index = replace(index, tar=self.path)
        self.map = ArrivalMap.create(folder / f"{tar.name}.map", len(self.data))
        self.meter = NetworkMeter(folder / f"{tar.name}.meter")
        self.source = StreamSource(self.index, self.map, self.meter)

    def bring(self, *chunks: int) -> None:
        """Some chunks arrive."""
        with open(self.part if self.part.exists() else self.path, "r+b") as file:
            for chunk in chunks:
                file.seek(chunk * CHUNK)
                file.write(self.data[chunk * CHUNK :][:CHUNK])
                file.flush()
                self.map.mark(chunk)

    def bring_all(self) -> None:
        self.bring(*range(len(self.map.here)))

    def finish(self) -> None:
        """The file is whole and gets its name."""
        self.bring_all()
        self.part.rename(self.path)
        self.map.mark_all()

    def chunks_of(self, *samples: int) -> list[int]:
        """The chunks that some images and their headers lie in."""
        found: set[int] = set()
        for i in samples:
            offset, size = int(self.index.offset[i]), int(self.index.size[i])
            found.update(range((offset - 512) // CHUNK, (offset + size - 1) // CHUNK + 1))
        return sorted(found)

    def image(self, sample: int) -> bytes:
        """The bytes of an image, as the whole tar has them."""
        return self.data[int(self.index.offset[sample]) :][: int(self.index.size[sample])]
