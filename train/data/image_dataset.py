"""Images one by one, as torchvision's ImageFolder gives them: for any DataLoader."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, SupportsIndex, overload

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from train.data.decode import UNIFORMS_PER_SAMPLE, choose_decoder, open_image
from train.data.sources import Source
from train.data.stream_source import StreamSource

Split = Literal["train", "val"]
Decode = Callable[[bytes, str], Any]  # from the bytes of an image, and where they are for a message


def whole_image(data: bytes, where: str) -> Image.Image:
    """The picture as ImageFolder gives it: Pillow's, in RGB."""
    return open_image(data, where)


@dataclass(frozen=True)
class RandomCrop:
    """Decodes a random resized crop, flipped or not, and nothing beside it: uint8 [3, size, size].

    The random numbers are torch's: torch.manual_seed and a DataLoader's workers set them.
    """

    size: int
    decoder: str = "auto"

    def __call__(self, data: bytes, where: str) -> torch.Tensor:
        uniforms = torch.rand(UNIFORMS_PER_SAMPLE, dtype=torch.float64).numpy()
        pixels = np.empty((self.size, self.size, 3), np.uint8)
        choose_decoder(self.decoder).train(data, where, uniforms, pixels)
        return torch.from_numpy(pixels).permute(2, 0, 1)


@dataclass(frozen=True)
class CentreCrop:
    """Decodes the centre of the resized image, as a validation needs it: uint8 [3, size, size]."""

    size: int
    decoder: str = "auto"

    def __call__(self, data: bytes, where: str) -> torch.Tensor:
        pixels = np.empty((self.size, self.size, 3), np.uint8)
        choose_decoder(self.decoder).val(data, where, pixels)
        return torch.from_numpy(pixels).permute(2, 0, 1)


class Samples(Sequence[tuple[str, int]]):
    """(where an image is, its class) of all images, made when asked for.

    A list of 1.28 million of them would take 200 MB, in each worker of a DataLoader again.
    """

    def __init__(self, source: Source) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    @overload
    def __getitem__(self, index: SupportsIndex) -> tuple[str, int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[tuple[str, int]]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> tuple[str, int] | list[tuple[str, int]]:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        number = range(len(self))[index]
        return self._source.where(number), int(self._source.labels[number])

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return (self[number] for number in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as a list


class ImageDataset(Dataset[tuple[Any, Any]]):
    """Labelled images of a source: a drop-in for torchvision's ImageFolder.

    It can be pickled, and read in forked and in spawned workers. Of a URL that is streamed, close()
    or the end of a `with` ends the fetcher, unless another data set of this process reads it.
    """

    def __init__(
        self,
        source: Source,
        root: Path,
        split: Split,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        decode: Decode = whole_image,
        stream: Any = None,  # of the process that opened it: it lives as long as this
    ) -> None:
        self.source, self.root, self.split, self.decode = source, root, split, decode
        self.transform, self.target_transform = transform, target_transform
        self.stream = stream

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"stream": None}

    def close(self) -> None:
        """Reads no more; what has arrived stays on the disk. May be called again."""
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.leave()

    def __enter__(self) -> ImageDataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: SupportsIndex) -> tuple[Any, Any]:
        number = range(len(self))[operator.index(index)]
        image = self.decode(self.source.read(number), self.source.where(number))
        label: Any = int(self.source.labels[number])
        if self.transform is not None:
            image = self.transform(image)
        if self.target_transform is not None:
            label = self.target_transform(label)
        return image, label

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[tuple[Any, Any]]:
        """A whole batch, as a DataLoader asks for it: what is still to arrive comes together."""
        if isinstance(self.source, StreamSource):
            self.source.announce(range(len(self))[operator.index(index)] for index in indices)
        return [self[index] for index in indices]

    @property
    def classes(self) -> list[str]:
        return self.source.classes

    @property
    def class_to_idx(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.classes)}

    @functools.cached_property
    def targets(self) -> list[int]:
        """The class of every image."""
        labels: list[int] = self.source.labels.tolist()
        return labels

    @property
    def samples(self) -> Samples:
        """(path, class) of every image; of one in a tar: its name and the tar."""
        return Samples(self.source)

    imgs = samples  # ImageFolder's other name for them

    def __repr__(self) -> str:
        return f"{len(self)} images of {len(self.classes)} classes: {self.split} of {self.root}"
