"""Is our extractor faster than every other way, and how far is it from what the disk can do?

python benchmarks/extract.py --rounds 5
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench import CACHE, BenchFlags, make_data, median, rounds_flag, write_result
from benchmarks.extract_doc import extract_tables
from benchmarks.extract_peers import Cost, cases, measure
from dataset.archive.tar_images import list_tar
from dataset.errors import UserError, run_command
from dataset.flags import flag, make_parser, parse_flags

_DIRTY_RATIO, _DIRTY_BYTES = (
    Path("/proc/sys/vm") / name for name in ("dirty_ratio", "dirty_bytes")
)
_SETTLE_S = 0.5  # the kernel frees the memory of the files before


@dataclass(frozen=True, kw_only=True)
class ExtractFlags(BenchFlags):
    """The flags of benchmarks/extract.py."""

    rounds: int = rounds_flag(5)
    classes: int = flag(40, "default 40")
    per_class: int = flag(100, "train images, default 100")
    dirty_ratio: int | None = flag(
        None,
        "on ext4: vm.dirty_ratio meanwhile (root), where the machine's own is so low that the "
        "disk is measured; Linux comes with 20",
        metavar="PERCENT",
    )
    tmpfs: Path = flag(Path("/dev/shm"), "default /dev/shm")
    disk: Path = flag(CACHE, "without root: a folder on ext4, default .cache/benchmarks")


def main() -> int:
    flags = parse_flags(ExtractFlags, make_parser(__doc__))
    tar = make_data(flags.classes, flags.per_class, 1, "500x375") / "ILSVRC2012_img_train.tar"
    result: dict[str, Any] = {"rounds": flags.rounds} | _facts(tar)
    result["tmpfs"] = {"cases": _measure(tar, flags.tmpfs, flags.rounds)}
    with fresh_ext4(CACHE / "ext4.img") as ext4:
        if ext4 is None:
            print(f"no root, no loop device: {flags.disk} instead of a fresh ext4", file=sys.stderr)
        with dirty_ratio(flags.dirty_ratio):
            result["dirty"] = describe_dirty_limit()
            result["ext4"] = {"cases": _measure(tar, ext4 or flags.disk, flags.rounds)}
    print(extract_tables(result))
    print("\nwritten to", write_result("extract", result, flags))
    return 0


def _facts(tar: Path) -> dict[str, Any]:
    with open(tar, "rb") as file:
        listing = list_tar(file.fileno(), tar, "train", lambda names: [])
    return {"images": len(listing.names), "image_mb": float(listing.size.sum() / 1e6)}


@contextmanager
def fresh_ext4(image: Path) -> Iterator[Path | None]:
    """A new ext4 in a file, mounted; None where that cannot be had.

    The disk's own would do, were it not for an ext4 without a journal, which reuses no inode for
    minutes after its deletion: whoever deleted files before would be measured too.
    """
    where = Path(tempfile.mkdtemp(prefix="trainyard-ext4-"))
    image.parent.mkdir(parents=True, exist_ok=True)
    image.unlink(missing_ok=True)
    try:
        with open(image, "wb") as file:
            file.truncate(8 << 30)
        make = ["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0", str(image)]
        mount = ["mount", "-o", "loop", str(image), str(where)]
        if all(
            subprocess.run(line, stderr=subprocess.DEVNULL).returncode == 0
            for line in (make, mount)
        ):
            yield where
            subprocess.run(["umount", str(where)], check=True)
        else:
            yield None
    finally:
        subprocess.run(["umount", str(where)], stderr=subprocess.DEVNULL)
        image.unlink(missing_ok=True)
        where.rmdir()


@contextmanager
def dirty_ratio(percent: int | None) -> Iterator[None]:
    """Lets this share of the memory wait for the disk, and puts the machine's own limit back."""
    if percent is None:
        yield
        return
    # Of the two files the one that was written last counts, and the other one reads as 0.
    before = {path: path.read_text() for path in (_DIRTY_RATIO, _DIRTY_BYTES)}
    try:
        _DIRTY_RATIO.write_text(str(percent))
    except OSError as error:
        raise UserError(f"--dirty-ratio needs root: {error}") from error
    try:
        yield
    finally:
        for path, text in before.items():
            if int(text):
                path.write_text(text)


def describe_dirty_limit() -> str:
    """How much written data may wait for the disk before a writer waits too."""
    num = int(_DIRTY_BYTES.read_text())
    return f"{num / 1e6:.0f} MB" if num else f"{int(_DIRTY_RATIO.read_text())} % of the memory"


def _measure(tar: Path, folder: Path, rounds: int) -> dict[str, dict[str, Any]]:
    """The costs of each case, round by round, each in a folder that never existed before."""
    tar.read_bytes()  # into the page cache
    work = Path(tempfile.mkdtemp(prefix="trainyard-extract-", dir=folder))
    costs: dict[str, list[Cost]] = {name: [] for name in cases()}
    try:
        for number in range(rounds):
            for place, (name, case) in enumerate(cases().items()):
                out = work / f"{number}-{place}"
                subprocess.run(["sync", "-f", work], check=True)  # nothing left of the one before
                time.sleep(_SETTLE_S)
                costs[name].append(measure(case, tar, out))
                seconds = costs[name][-1].seconds
                print(f"round {number + 1}: {name}: {seconds:.3f} s", file=sys.stderr)
                shutil.rmtree(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return {
        name: {
            "seconds": median([cost.seconds for cost in runs]),
            "all_seconds": [round(cost.seconds, 4) for cost in runs],
            "cpu_s": median([cost.cpu_s for cost in runs]),
            "mb_dirtied": median([cost.mb_dirtied for cost in runs]),
        }
        for name, runs in costs.items()
    }


if __name__ == "__main__":
    sys.exit(run_command(main))
