"""The ways of extracting the train tar that benchmarks/extract.py compares."""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dataset.archive.extract import Extraction, extract_archive
from dataset.archive.listing import Listing
from dataset.archive.tar_images import list_tar

ROOT = Path(__file__).resolve().parents[1]
OURS, OUR_COMMAND = "ours, 2 threads", "ours, as a command"
LIMIT = "limit: from memory, 2 processes"
# As in the Kempner Institute's scalable-vision-workflows.
KEMPNER = "ThreadPool of tarfile, 8 threads (the Kempner extractor)"
Unpack = Callable[[], None]
Case = Callable[[Path, Path], Unpack]  # (train tar, fresh folder) -> what is timed


@dataclass(frozen=True)
class Cost:
    """What one extraction took."""

    seconds: float
    cpu_s: float
    mb_dirtied: float


def measure(case: Case, tar: Path, out: Path) -> Cost:
    """The cost of one case in a forked process that has its modules; its set-up is not counted."""
    out.mkdir(parents=True)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run = case(tar, out)
            start = _now()
            run()
            costs = [after - before for after, before in zip(_now(), start, strict=True)]
            os.write(writer, " ".join(map(str, costs)).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    if os.waitpid(child, 0)[1] != 0:
        raise RuntimeError(f"extracting into {out} failed")
    return Cost(*map(float, text.split()))


def _now() -> tuple[float, float, float]:
    """Seconds, CPU seconds and MB dirtied so far, by this process and its ended children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_s = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    return time.perf_counter(), cpu_s, sum(usage.ru_oublock for usage in usages) * 512 / 1e6


def ours(tar: Path, out: Path) -> Unpack:
    """This project's extractor with 2 threads, as a call."""
    return lambda: _check(extract_archive(Extraction(tar, "train", out, num_threads=2)).num_images)


def our_command(tar: Path, out: Path) -> Unpack:
    """The same as a command, the start of Python and numpy included."""
    script = ROOT / "scripts" / "extract_ILSVRC_mp.py"
    flags = f"--run_type train --train_tar {tar} --output_dir {out} --num_threads 2"
    return partial(_shell, f"{sys.executable} {script} {flags}", out)


def shell(tar: Path, out: Path) -> Unpack:
    """scripts/extract_ILSVRC.sh: one tar after the other."""
    (out / "ILSVRC2012_img_train.tar").symlink_to(tar.resolve())
    return partial(_shell, f"{ROOT}/scripts/extract_ILSVRC.sh {out}", out)


def xargs(program: str, tar: Path, out: Path) -> Unpack:
    """The outer tar, then two tars at a time: the best that a shell line does."""
    unpack = f'd="${{1%.tar}}"; mkdir "$d" && {program} -xf "$1" -C "$d" && rm "$1"'
    line = f"mkdir train && {program} -xf {tar.resolve()} -C train && ls train/*.tar"
    return partial(_shell, f"{line} | xargs -P2 -I@ sh -c {shlex.quote(unpack)} sh @", out)


def thread_pool(num_threads: int, tar: Path, out: Path) -> Unpack:
    """The Kempner extractor's way: the outer tar to disk, then threads of tarfile.extractall."""
    return partial(_pool, ThreadPoolExecutor(num_threads), tar, out)


def process_pool(tar: Path, out: Path) -> Unpack:
    """The same in processes."""
    return partial(_pool, ProcessPoolExecutor(2), tar, out)


def torchvision(tar: Path, out: Path) -> Unpack:
    """torchvision's parse_train_archive, without its check of the real archive's MD5."""
    from torchvision.datasets import imagenet

    imagenet._verify_archive = lambda *args: None
    return lambda: imagenet.parse_train_archive(str(out), str(tar.resolve()))


def limit(tar: Path, out: Path) -> Unpack:
    """The same files written from memory by 2 processes that are there already."""
    with open(tar, "rb") as file:
        listing = list_tar(file.fileno(), tar, "train", lambda names: [])
        memory = memoryview(file.read())
    workers = [_start_writer(listing, memory, out / "train", part) for part in range(2)]

    def run() -> None:
        for go, _ in workers:
            os.write(go, b"x")
        for _, pid in workers:
            _check(os.waitpid(pid, 0)[1] == 0)

    return run


def _start_writer(listing: Listing, memory: memoryview, folder: Path, part: int) -> tuple[int, int]:
    """A process that writes every second class as soon as it is told to."""
    waiting, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work = _files_of(listing, part)
            bytes(memory[::4096])  # its pages are mapped before the clock starts
            os.read(waiting, 1)
            for wnid, files in work.items():
                _write_class(memory, folder / os.fsdecode(wnid), files)
            code = 0
        finally:
            os._exit(code)
    return go, pid


def _files_of(listing: Listing, part: int) -> dict[bytes, list[tuple[bytes, int, int]]]:
    work: dict[bytes, list[tuple[bytes, int, int]]] = {
        wnid: [] for wnid in listing.classes[part::2]
    }
    rows = zip(listing.label, listing.names, listing.offset, listing.size, strict=True)
    for label, name, offset, size in rows:
        if listing.classes[label] in work:
            work[listing.classes[label]].append((name, int(offset), int(size)))
    return work


def _write_class(memory: memoryview, folder: Path, files: list[tuple[bytes, int, int]]) -> None:
    folder.mkdir(parents=True)
    dir_fd = os.open(folder, os.O_RDONLY)
    for name, offset, size in files:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=dir_fd)
        os.write(fd, memory[offset : offset + size])
        os.close(fd)
    os.close(dir_fd)


def _pool(executor: Executor, tar: Path, out: Path) -> None:
    train = out / "train"
    with tarfile.open(tar) as outer:
        outer.extractall(train)
    with executor as pool:
        list(pool.map(_extract_class, sorted(train.glob("*.tar"))))


def _extract_class(path: Path) -> None:
    with tarfile.open(path) as inner:
        inner.extractall(path.with_suffix(""))
    path.unlink()


def _shell(line: str, folder: Path) -> None:
    subprocess.run(line, shell=True, check=True, cwd=folder, capture_output=True)


def _check(is_right: object) -> None:
    if not is_right:
        raise RuntimeError("nothing was extracted")


def cases() -> dict[str, Case]:
    """All cases in the order of the table."""
    found: dict[str, Case] = {
        OURS: ours,
        OUR_COMMAND: our_command,
        LIMIT: limit,
        "xargs -P2 tar": partial(xargs, "tar"),
        "scripts/extract_ILSVRC.sh": shell,
        KEMPNER: partial(thread_pool, 8),
        "ThreadPool of tarfile, 2 threads": partial(thread_pool, 2),
        "ProcessPool of tarfile": process_pool,
        "torchvision parse_train_archive": torchvision,
    }
    if shutil.which("bsdtar"):
        found["xargs -P2 bsdtar"] = partial(xargs, "bsdtar")
    return found
