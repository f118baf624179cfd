"""What does an index of a tar cost, warm and cold, and are reads through it as fast as files?

python benchmarks/index.py --rounds 5
"""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench import (
    CACHE,
    BenchFlags,
    interleave,
    make_data,
    median,
    rounds_flag,
    write_result,
)
from benchmarks.extract_doc import index_tables
from dataset.archive.index import build_index
from dataset.archive.index_file import TarIndex
from dataset.errors import run_command
from dataset.flags import flag, make_parser, parse_flags

MEAN_IMAGE = 110_000
IMAGE_SIZES = range(20_000, 2 * MEAN_IMAGE - 20_000)
NUM_CLASSES, PER_CLASS = 1000, 1281
TRAIN = "ILSVRC2012_img_train.tar"


@dataclass(frozen=True, kw_only=True)
class IndexFlags(BenchFlags):
    """The flags of benchmarks/index.py."""

    rounds: int = rounds_flag(5)
    classes: int = flag(NUM_CLASSES, "of 1281 images, default 1000")
    tmpfs: Path = flag(Path("/dev/shm"), "5 GB of it for a while; /dev/shm")


def main() -> int:
    flags = parse_flags(IndexFlags, make_parser(__doc__))
    CACHE.mkdir(parents=True, exist_ok=True)
    result = {
        "rounds": flags.rounds,
        "growth": _growth(flags.rounds, flags.classes, flags.tmpfs),
        "real_bytes": _real_bytes(flags.rounds),
    }
    print(index_tables(result))
    print("\nwritten to", write_result("index", result, flags))
    return 0


def _growth(rounds: int, most_classes: int, tmpfs: Path) -> list[dict[str, Any]]:
    """Sparse tars of up to the real number of images: cost an image, warm and cold, and memory."""
    rows: list[dict[str, Any]] = []
    for num_classes in (most_classes // 8, most_classes // 4, most_classes // 2, most_classes):
        # Cold once, on the smallest: two minutes for every million images, all of it waiting.
        cold = None if rows else _cold_s(num_classes)
        with tempfile.TemporaryDirectory(prefix="trainyard-index-", dir=tmpfs) as folder:
            tar = Path(folder) / "sparse.tar"
            write_sparse_tar(tar, num_classes, PER_CLASS)
            warm = [_in_child(partial(_index, tar)) for _ in range(rounds)]
        num = num_classes * PER_CLASS
        rows.append(
            {
                "images": num,
                "tar_gb": round(num * MEAN_IMAGE / 1e9, 1),
                "warm_s": median([seconds for seconds, _ in warm]),
                "warm_us_per_image": 1e6 * median([seconds for seconds, _ in warm]) / num,
                "cold_s": cold,
                "peak_mb": max(peak for _, peak in warm),
            }
        )
        print(rows[-1], file=sys.stderr)
    return rows


def _cold_s(num_classes: int) -> float:
    """Seconds for a tar on the disk of which nothing is in memory."""
    with tempfile.TemporaryDirectory(prefix="index-", dir=CACHE) as folder:
        tar = Path(folder) / "sparse.tar"
        write_sparse_tar(tar, num_classes, PER_CLASS)
        return _in_child(lambda: _index_cold(tar))[0]


def write_sparse_tar(
    path: Path, num_classes: int, per_class: int, image_sizes: range = IMAGE_SIZES
) -> None:
    """A train tar of real size whose images are holes: only the headers take space."""
    random_sizes = random.Random(0)
    with open(path, "wb") as file:
        for c in range(num_classes):
            wnid = f"n{c:08d}"
            sizes = [
                random_sizes.randrange(image_sizes.start, image_sizes.stop)
                for _ in range(per_class)
            ]
            inner = sum(512 + (size + 511) // 512 * 512 for size in sizes) + 1024
            file.write(_header(f"{wnid}.tar", inner))
            for i, size in enumerate(sizes):
                file.write(_header(f"{wnid}_{i}.JPEG", size))
                file.seek((size + 511) // 512 * 512, os.SEEK_CUR)
            file.write(bytes(1024))
        file.write(bytes(10240))
    subprocess.run(["sync", "-f", path], check=True)


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


def _index(tar: Path) -> float:
    start_s = time.perf_counter()
    build_index(tar)
    return time.perf_counter() - start_s


def _index_cold(tar: Path) -> float:
    """The same with nothing of the tar in memory."""
    with open(tar, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return _index(tar)


def _in_child(call: Callable[[], float]) -> tuple[float, float]:
    """The seconds that a call returns in a forked process, and that process's peak memory in MB."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            seconds = call()
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
            os.write(writer, f"{seconds} {peak}".encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        seconds, peak = map(float, pipe.read().split())
    os.waitpid(child, 0)
    return seconds, peak


def _real_bytes(rounds: int) -> dict[str, Any]:
    """A fake ImageNet: our index against tarfile's walk, and random reads against files."""
    data = make_data(40, 100, 1, "500x375")
    tar = data / TRAIN
    index, _ = build_index(tar)
    order = random.Random(0).sample(range(len(index)), len(index))
    paths = [f"{data}/train/{index.classes[index.label[i]]}/{index.name(i)}" for i in order]
    cases = {
        "index, header-only": lambda: _index(tar),
        "index --checksums": lambda: _seconds(lambda: build_index(tar, checksums=True)),
        "tarfile walk": lambda: _seconds(lambda: walk_with_tarfile(tar)),
        "random reads through the index": lambda: read_through_index(index, order),
        "random reads of files": lambda: read_files(paths, index.size[order].tolist()),
    }
    values = interleave(cases, rounds)
    micro = {name: [1e6 * run / len(index) for run in runs] for name, runs in values.items()}
    return {"images": len(index), "us_per_image": micro}


def walk_with_tarfile(tar: Path) -> int:
    """What the standard library does for the same: every class tar opened in place."""
    num = 0
    with tarfile.open(tar) as outer:
        for member in outer:
            inner = outer.extractfile(member)
            assert inner is not None
            with tarfile.open(fileobj=inner) as class_tar:
                num += sum(1 for _ in class_tar)
    return num


def read_through_index(index: TarIndex, order: list[int]) -> float:
    """Seconds for reading each image once, as the trainer does."""
    offsets, sizes = index.offset[order].tolist(), index.size[order].tolist()
    fd = os.open(index.tar, os.O_RDONLY)
    start_s = time.perf_counter()
    for offset, size in zip(offsets, sizes, strict=True):
        os.pread(fd, size, offset)
    seconds = time.perf_counter() - start_s
    os.close(fd)
    return seconds


def read_files(paths: list[str], sizes: list[int]) -> float:
    """Seconds for reading each file once; the sizes are given, which saves it a stat."""
    start_s = time.perf_counter()
    for path, size in zip(paths, sizes, strict=True):
        fd = os.open(path, os.O_RDONLY)
        os.read(fd, size)
        os.close(fd)
    return time.perf_counter() - start_s


def _seconds(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


if __name__ == "__main__":
    sys.exit(run_command(main))
