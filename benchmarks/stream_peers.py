"""The peers of benchmarks/stream.py: pelicanfs, webdataset, mosaicml-streaming in a plain loop.

    python -m benchmarks.stream_peers '{"way": "pelicanfs", ...}'

A process of its own for each, with the step of benchmarks/stream_notes.py and two loading
processes. Each is used as its documentation says. After a kill the loop goes on from a checkpoint
of every step, with the state that the peer's loader has to give (mosaicml-streaming's); the others
have none, and start their epoch anew.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
import time
import urllib.request
import zlib
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.stream_data import convert_to_mds, convert_to_webdataset, load_index
from benchmarks.stream_notes import Notes, hold_step, make_net

WORKERS = 2
SHUFFLED = 1000  # samples in webdataset's buffer, its documentation's value
MOSAIC = "mosaic"


@dataclass(frozen=True)
class Task:
    """What to train on, and how; a JSON object."""

    way: str  # or "convert-" and the way
    tar: str  # the local tar, to convert it or for its index
    folder: str  # for shards that are kept, and the checkpoint; or for converted ones
    urls: list[str] = field(default_factory=list)
    federation: str = ""
    notes: str = ""
    batch_size: int = 64
    pixels: int = 56
    epochs: int = 2
    step_s: float = 0.0
    trace: bool = False


def decode(data: bytes, label: int, pixels: int) -> tuple[torch.Tensor, int, int]:
    """Pixels, label and crc32 of an image."""
    image = Image.open(io.BytesIO(data)).convert("RGB").resize((pixels, pixels))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1), label, zlib.crc32(data)


class PelicanImages(Dataset[Any]):
    """The images of a tar, each by a request for its bytes; those of a batch at the same time."""

    def __init__(self, task: Task) -> None:
        index = load_index(Path(task.tar))
        self.first, self.size, self.labels = index.offset, index.size, index.label
        self.task = task
        self._files: Any = None  # made in the loading process

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, numbers: list[int]) -> list[tuple[torch.Tensor, int, int]]:
        if self._files is None:
            self._files = import_module("pelicanfs.core").PelicanFileSystem(self.task.federation)
        first = [int(self.first[number]) for number in numbers]
        end = [int(self.first[number] + self.size[number]) for number in numbers]
        paths = self.task.urls * len(numbers)
        images = self._files.cat_ranges(paths, first, end, on_error="raise")
        labels = [int(self.labels[number]) for number in numbers]
        pairs = zip(images, labels, strict=True)
        return [decode(data, label, self.task.pixels) for data, label in pairs]


def open_pelicanfs(task: Task) -> Any:
    """A loader in a random order."""
    chance = torch.Generator().manual_seed(0)
    return DataLoader(
        PelicanImages(task), task.batch_size, True, num_workers=WORKERS, generator=chance
    )


def open_webdataset(task: Task) -> Any:
    """A loader of shards that are kept on the disk."""
    wds = import_module("webdataset")
    Path(task.folder).mkdir(parents=True, exist_ok=True)
    shards = wds.WebDataset(task.urls, shardshuffle=len(task.urls), cache_dir=task.folder)
    samples = shards.shuffle(SHUFFLED).to_tuple("jpg", "cls")
    images = samples.map(lambda pair: decode(pair[0], int(pair[1]), task.pixels))
    return DataLoader(images, task.batch_size, num_workers=WORKERS)


def open_mosaic(task: Task) -> Any:
    """A loader of shards that are kept on the disk; its package knows no http, so that is ours."""
    streaming = import_module("streaming")
    download = import_module("streaming.base.storage.download")

    class HttpDownloader(download.CloudDownloader):  # type: ignore[misc,name-defined]
        @staticmethod
        def _client_identifier() -> str:
            return "http"

        def clean_up(self) -> None:
            pass

        def _download_file_impl(self, remote: str, local: str, timeout: float) -> None:
            with urllib.request.urlopen(remote) as body, open(local, "wb") as file:
                shutil.copyfileobj(body, file, 1 << 20)

    download.DOWNLOADER_MAPPINGS["http"] = HttpDownloader
    import_module("streaming.base.util").clean_stale_shared_memory()  # of a killed run

    class MosaicImages(streaming.StreamingDataset):  # type: ignore[misc,name-defined]
        def __getitem__(self, number: int) -> Any:
            sample = super().__getitem__(number)
            return decode(sample["image"], sample["label"], task.pixels)

    images = MosaicImages(
        remote=task.urls[0], local=task.folder, shuffle=True, batch_size=task.batch_size
    )
    return streaming.StreamingDataLoader(images, batch_size=task.batch_size, num_workers=WORKERS)


OPENERS = {"pelicanfs": open_pelicanfs, "webdataset": open_webdataset, MOSAIC: open_mosaic}
CONVERTERS = {"webdataset": convert_to_webdataset, MOSAIC: convert_to_mds}


def train(task: Task) -> None:
    """Epochs of fixed steps."""
    notes = Notes(Path(task.notes))
    checkpoint = Path(task.folder).with_suffix(".checkpoint")
    net = make_net(1000)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    loader = OPENERS[task.way](task)
    step = epoch = 0
    if checkpoint.exists():
        saved = json.loads(checkpoint.read_text())
        step, epoch = saved["step"], saved["epoch"]
        if saved["loader"] is not None:
            loader.load_state_dict(saved["loader"])
    for number in range(epoch, task.epochs):
        for images, labels, crcs in loader:
            begin_s = time.monotonic()
            loss = nn.functional.cross_entropy(net(images.float() / 255), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            hold_step(begin_s, task.step_s)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            notes.add(step=step, **({"crcs": crcs.tolist()} if task.trace else {}))
            if task.trace:
                state = loader.state_dict() if hasattr(loader, "state_dict") else None
                _save(checkpoint, {"step": step, "epoch": number, "loader": state})
        notes.add(epoch=number + 1)


def _save(path: Path, state: dict[str, Any]) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(state))
    part.replace(path)


def main() -> int:
    task = Task(**json.loads(sys.argv[1]))
    way = task.way.removeprefix("convert-")
    torch.set_num_threads(1)
    with contextlib.suppress(KeyboardInterrupt):
        if way != task.way:
            CONVERTERS[way](Path(task.tar), Path(task.folder))
        else:
            train(task)
    return 0


if __name__ == "__main__":
    sys.exit(main())
