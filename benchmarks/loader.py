"""How fast do images reach the model on two cores? Ours from the tar, peers their own way.

    python benchmarks/loader.py --rounds 5

All loaders run one after the other, interleaved, on the same warm images: 500x375 JPEGs of
about 110 KB, RandomResizedCrop(224) and flip for training, Resize(256) and CenterCrop(224) for
validation. `uint8` loaders leave the normalisation to the device, where it is a conversion and
three in-place operations. Ours loads in threads with the kernel and in worker processes with
Pillow; for training the other way is measured too, so that the default can follow the faster one.
`open_images` and `batches` are the same for loops that are not ours (train/torch_data.py). A row
that other programs disturbed says how much of the cores they took.
"""

from __future__ import annotations

import io
import math
import sys
import tarfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torchvision
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from benchmarks.bench import (
    BenchFlags,
    Table,
    describe_disturbance,
    describe_ratio,
    interleave_with_shares,
    make_data,
    median,
    report,
    rounds_flag,
)
from benchmarks.reference_loop import make_loader, pil_steps
from dataset.errors import UserError, run_command
from dataset.flags import flag, make_parser, parse_flags
from dataset.names import TRAIN_TAR, VAL_TAR
from train.data.batches import Images, Item
from train.data.decode import UNIFORMS_PER_SAMPLE, choose_decoder
from train.data.image_dataset import Split
from train.data.loader import load_batches
from train.data.sampler import BatchPlan, sample_uniforms
from train.data.splits import Dataset, open_dataset
from train.device import keep_freed_memory
from train.step import Placement
from train.torch_data import CentreCrop, ImageDataset, RandomCrop, batches, open_images

BATCH, SIZE, WORKERS, CLASSES = 64, 224, 2, 8
REFERENCE = "pytorch/examples: ImageFolder, PIL, float"
OURS_PIL = "ours without the kernel: Pillow, uint8"
OURS_FLOAT, OURS = "ours: kernel, float on the CPU", "ours: kernel, uint8"
PUBLIC_PIL = "open_images in a DataLoader, PIL, float"
PUBLIC = "open_images in a DataLoader, our crop, uint8"
READY = "batches, uint8"
OTHER_PIL = "ours without the kernel: Pillow in threads, uint8"
OTHER = "ours: kernel in worker processes, uint8"
TARGETS = {OURS_PIL: 1.25, OURS_FLOAT: 1.6, OURS: 2.0, PUBLIC: 1.3, READY: 2.5}
MIN_PSNR_DB, MAX_BIAS = 50, 0.05
PLACEMENT = Placement(torch.device("cpu"), "fp32", channels_last=True)
Loader = Callable[[], Iterable[Any]]


@dataclass(frozen=True, kw_only=True)
class LoaderFlags(BenchFlags):
    """The flags of benchmarks/loader.py."""

    rounds: int = rounds_flag(5)
    images_per_class: int = flag(160, f"of {CLASSES} classes, half as many for validation")

    def __post_init__(self) -> None:
        least = 2 * 2 * BATCH // CLASSES  # the first batch of a split is not timed
        if self.rounds < 1 or self.images_per_class < least:
            raise UserError(
                f"--rounds {self.rounds} --images-per-class {self.images_per_class}: give at least "
                f"1 round and {least} images, for two batches of {BATCH} in each split"
            )


def main() -> int:
    flags = parse_flags(LoaderFlags, make_parser(__doc__))
    torch.set_num_threads(1)
    keep_freed_memory()  # as a run on a CPU does; here for all loaders
    folder = make_data(CLASSES, flags.images_per_class, flags.images_per_class // 2, "500x375")
    data = open_dataset(folder / "ILSVRC2012_img_train.tar", None)
    result: dict[str, Any] = {"rounds": flags.rounds, "pixels": compare_pixels(data)}
    result["others_share"] = {}
    splits: tuple[Split, ...] = ("train", "val")
    for split in splits:
        cases = {name: rate(loader) for name, loader in make_loaders(folder, data, split).items()}
        found = interleave_with_shares(cases, flags.rounds)
        result[split], result["others_share"][split] = found
    return report("loader", result, tables, flags)


def make_loaders(folder: Path, data: Dataset, split: Split) -> dict[str, Loader]:
    """Every way to load a split, by name; ours last."""
    loaders: dict[str, Loader] = {
        REFERENCE: lambda: make_loader(folder, split, SIZE, BATCH, WORKERS),
        "torchvision.io + transforms v2, uint8": lambda: _tv_io(folder / split, split),
        "webdataset, PIL, float": lambda: _webdataset(folder, split),
        OURS_PIL: lambda: load_ours(data, split, "pil"),
        OURS_FLOAT: lambda: map(_normalise, load_ours(data, split, "kernel")),
        OURS: lambda: load_ours(data, split, "kernel"),
        PUBLIC_PIL: lambda: _in_a_dataloader(folder, split, pil_steps(split, SIZE)),
        PUBLIC: lambda: _in_a_dataloader(folder, split, None),
        READY: lambda: batches(data_of(folder, split), BATCH, split, num_workers=WORKERS),
    }
    if split == "train":
        loaders[OTHER_PIL] = lambda: load_ours(data, split, "pil", in_threads=True)
        loaders[OTHER] = lambda: load_ours(data, split, "kernel", in_threads=False)
    return loaders


def rate(loader: Loader) -> Callable[[], float]:
    """Images a second from the first batch to the last: the start of workers is not counted."""

    def measure() -> float:
        num_images, begin_s = 0, 0.0
        for number, batch in enumerate(loader()):
            images = batch.images if hasattr(batch, "images") else batch[0]
            if number == 0:
                begin_s = time.perf_counter()
            else:
                num_images += len(images)
        return num_images / (time.perf_counter() - begin_s)

    return measure


def _tv_io(root: Path, split: Split) -> Iterable[Any]:
    crop = (
        [v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip()]
        if split == "train"
        else [v2.Resize(256, antialias=True), v2.CenterCrop(SIZE)]
    )
    rgb = torchvision.io.ImageReadMode.RGB

    def read(path: str) -> torch.Tensor:
        image: torch.Tensor = torchvision.io.decode_jpeg(torchvision.io.read_file(path), mode=rgb)
        return image

    images = torchvision.datasets.ImageFolder(str(root), v2.Compose(crop), loader=read)
    return DataLoader(images, BATCH, shuffle=split == "train", num_workers=WORKERS)


def _webdataset(folder: Path, split: Split) -> Iterable[Any]:
    import webdataset as wds

    shards = _make_shards(folder, split)
    steps = pil_steps(split, SIZE)
    images = (
        wds.WebDataset(shards, shardshuffle=False, empty_check=False)
        .decode("pil")
        .to_tuple("jpg", "cls")
        .map_tuple(steps, lambda label: label)
        .batched(BATCH)
    )
    return DataLoader(images, batch_size=None, num_workers=WORKERS)


def data_of(folder: Path, split: Split) -> ImageDataset:
    """The images of the tar of a split, in place."""
    return open_images(folder / (TRAIN_TAR if split == "train" else VAL_TAR), split)


def _in_a_dataloader(folder: Path, split: Split, transform: Any) -> Iterable[Any]:
    """What the first row does, with our images; without a transform, with our decoder too."""
    images, is_train = data_of(folder, split), split == "train"
    images.transform = transform
    if transform is None:
        images.decode = RandomCrop(SIZE) if is_train else CentreCrop(SIZE)
    return DataLoader(
        images,
        BATCH,
        shuffle=is_train,
        num_workers=WORKERS,
        drop_last=is_train,
        multiprocessing_context="fork",
    )


def _make_shards(folder: Path, split: Split) -> list[str]:
    """Two tars of image and class pairs, as webdataset wants them; made once."""
    names = [folder / f"shard-{split}-{number}.tar" for number in range(WORKERS)]
    if not all(name.exists() for name in names):
        paths = sorted((folder / split).rglob("*.JPEG"))
        labels = {wnid: n for n, wnid in enumerate(sorted({p.parent.name for p in paths}))}
        for number, name in enumerate(names):
            with tarfile.open(name, "w") as tar:
                for path in paths[number::WORKERS]:
                    _add(tar, f"{path.stem}.jpg", path.read_bytes())
                    _add(tar, f"{path.stem}.cls", str(labels[path.parent.name]).encode())
    return [str(name) for name in names]


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def load_ours(
    data: Dataset,
    split: Split,
    decoder_name: str,
    in_threads: bool | None = None,
    num_readers: int | None = None,
) -> Iterable[Any]:
    """Our batches; in_threads overrules what the decoder says of itself."""
    decoder = choose_decoder(decoder_name)
    if in_threads is not None:
        decoder.releases_gil = in_threads
    plan = BatchPlan(len(data.train), BATCH, BATCH, 0, 1)
    images = Images(data.train, data.val, plan, SIZE, 0, decoder)
    steps = range(plan.steps_per_epoch)
    items = [Item(0, step, 0) for step in steps]
    if split == "val":
        items = [Item(0, -1, part) for part in range(len(images.val_batches))]
    return load_batches(images, items, WORKERS, num_readers)


def _normalise(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return PLACEMENT.normalise(batch.images), batch.labels


def compare_pixels(data: Dataset) -> dict[str, float]:
    """The kernel against Pillow's crop().resize(), over 200 images: the worst of each."""
    kernel, pil = choose_decoder("kernel"), choose_decoder("pil")
    indices = np.arange(min(200, len(data.train)))
    uniforms = sample_uniforms(0, 0, indices, UNIFORMS_PER_SAMPLE)
    worst_psnr, worst_bias = math.inf, 0.0
    ours, theirs = (np.empty((SIZE, SIZE, 3), dtype=np.uint8) for _ in range(2))
    for index in indices:
        raw = data.train.read(int(index))
        kernel.train(raw, "", uniforms[index], ours)
        pil.train(raw, "", uniforms[index], theirs)
        difference = ours.astype(float) - theirs
        error = float(np.square(difference).mean())
        worst_psnr = min(worst_psnr, 10 * math.log10(255**2 / error) if error else math.inf)
        worst_bias = max(worst_bias, abs(float(difference.mean())))
    return {"worst_psnr_db": round(worst_psnr, 1), "worst_mean_bias": round(worst_bias, 4)}


def tables(result: dict[str, Any]) -> list[Table]:
    """Images a second by split, and the pixels."""
    shares = result.get("others_share", {})  # records of before have none
    found = [
        _split_table(split, result[split], shares.get(split, {}), result["rounds"])
        for split in ("train", "val")
    ]
    pixels = result["pixels"]
    rows = [
        ["worst PSNR, dB", f"{pixels['worst_psnr_db']:.1f}", f"at least {MIN_PSNR_DB}"],
        ["worst mean bias, levels", f"{pixels['worst_mean_bias']:.4f}", f"below {MAX_BIAS}"],
    ]
    title = "Pixels of the kernel against Pillow's crop and resize, 200 images"
    return [*found, (title, ["what", "found", "target"], rows)]


def _split_table(
    split: str, rates: dict[str, list[float]], shares: dict[str, list[float]], rounds: int
) -> Table:
    rows = []
    for name, values in rates.items():
        ratio = describe_ratio(values, rates[REFERENCE]) if name != REFERENCE else ""
        target = f"at least {TARGETS[name]}x" if split == "train" and name in TARGETS else ""
        note = describe_disturbance(shares.get(name, []))
        rows.append([name + note, f"{median(values):.0f}", ratio, target])
    title = f"{split}: {WORKERS} cores, batches of {BATCH}, median of {rounds} rounds"
    return title, ["loader", "images/s", "against the first", "target"], rows


if __name__ == "__main__":
    sys.exit(run_command(main))
