#!/usr/bin/env python3
"""Writes TAR.index for each tar, so that training reads its images from the tar, not unpacked."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dataset.packages import require_packages

require_packages("numpy")

from dataset.archive.index import build_index, find_current, find_index, verify_tar
from dataset.archive.index_file import load_index
from dataset.byte_meter import ByteMeter
from dataset.errors import DataError, UserError, run_command
from dataset.known_archives import find_published
from dataset.words import count
from train.records.stage_meter import measure_stage

log = logging.getLogger("trainyard")
PROVEN = "its MD5 is the published one"
UNPROVEN = "only its headers were read; --checksums compares all of it with the published MD5"
EXAMPLE = """examples:
  python scripts/index_tar.py data/ILSVRC2012_img_train.tar data/ILSVRC2012_img_val.tar
  python scripts/index_tar.py --checksums data/ILSVRC2012_img_train.tar    reads all bytes once
  python scripts/index_tar.py --verify data/ILSVRC2012_img_train.tar       names damaged bytes

The index is written beside the tar, or to --index-dir; if the tar's folder is read-only, to your
cache folder. `python -m train data` makes it on first use, too. Without --checksums only the
headers of a tar are read. With it, a published ILSVRC2012 archive must have its published MD5.
"""


def main() -> int:
    """Indexes, or verifies, one tar after the other."""
    args = _parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for tar in args.tar:
        if not tar.is_file():
            raise UserError(f"no such file: {tar}; give the path of an uncompressed tar")
    for tar in args.tar:
        (_verify if args.verify else _index)(tar, args)
    return 0


def _index(tar: Path, args: argparse.Namespace) -> None:
    if _is_up_to_date(tar, args):
        log.info("%s: the index is up to date", tar)
        return
    start_s = time.monotonic()
    with measure_stage("index", _record_folder(tar, args)) as stage:
        with ByteMeter(tar.name, sys.stderr) as meter:
            if args.checksums:
                meter.start(tar.stat().st_size)
            index, place = build_index(
                tar,
                index_dir=args.index_dir,
                labels=args.labels,
                checksums=args.checksums,
                progress=meter.update,
            )
        stage.extra = {"images": len(index), "checksums": args.checksums}
    seconds = time.monotonic() - start_s
    log.info(
        "%s: %s, %s in %.2f s (%.2f µs per image)",
        place,
        count(len(index.classes), "class", "classes"),
        count(len(index), "image"),
        seconds,
        1e6 * seconds / len(index),
    )
    if find_published(tar.name, tar.stat().st_size):
        log.info("%s: %s", tar, PROVEN if args.checksums else UNPROVEN)


def _is_up_to_date(tar: Path, args: argparse.Namespace) -> bool:
    """Whether the index is newer than the tar, belongs to it and has what the flags ask for."""
    place = find_index(tar, args.index_dir)
    if place is None or place.stat().st_mtime_ns < tar.stat().st_mtime_ns:
        return False
    try:
        wanted = {"index_dir": args.index_dir, "labels": args.labels, "checksums": args.checksums}
        return find_current(tar, **wanted) is not None
    except DataError:
        return False  # of another tar, or damaged: the new one replaces it


def _verify(tar: Path, args: argparse.Namespace) -> None:
    place = find_index(tar, args.index_dir)
    if place is None:
        raise UserError(
            f"{tar} has no index; write one when the tar is known to be good: "
            f"python scripts/index_tar.py --checksums {tar}"
        )
    start_s = time.monotonic()
    with ByteMeter(tar.name, sys.stderr) as meter:
        meter.start(tar.stat().st_size)
        verify_tar(load_index(place, tar), meter.update)
    size, seconds = tar.stat().st_size, time.monotonic() - start_s
    log.info("%s: all blocks are right, %d bytes in %.2f s", tar, size, seconds)


def _record_folder(tar: Path, args: argparse.Namespace) -> Path | None:
    """Where the line of the stage goes: --record, else the folder of the index, if writable."""
    folder: Path = args.record or args.index_dir or tar.resolve().parent
    return folder if args.record or not folder.exists() or os.access(folder, os.W_OK) else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("tar", type=Path, nargs="+", metavar="TAR", help="an uncompressed tar")
    add(
        "--labels",
        type=Path,
        metavar="FILE",
        help="valprep.sh or LOC_val_solution.csv for a flat tar; default: one beside the tar, else "
        "the built-in labels of the real set",
    )
    add("--checksums", action="store_true", help="also store a crc32c of every 4 MiB block")
    add("--verify", action="store_true", help="compare the tar with the checksums of its index")
    add("--index-dir", type=Path, metavar="DIR", help="folder for the indexes; default: the tar's")
    add("--record", type=Path, metavar="DIR", help="folder for stages.jsonl; default: the index's")
    return parser


if __name__ == "__main__":
    sys.exit(run_command(main))
