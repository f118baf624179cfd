#!/usr/bin/env python3
"""Extracts the ILSVRC archives into class folders: one pass, in parallel, resumable, checked."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dataset.packages import require_packages

require_packages("numpy")

from dataset.archive.extract import Extraction, extract_archive
from dataset.archive.listing import Split
from dataset.byte_meter import ByteMeter
from dataset.errors import UserError, run_command
from train.records.stage_meter import measure_stage

log = logging.getLogger("trainyard")
EXAMPLE = """examples:
  python scripts/extract_ILSVRC_mp.py --train_tar data/ILSVRC2012_img_train.tar \\
      --val_tar data/ILSVRC2012_img_val.tar --output_dir data --num_threads 8
  python scripts/extract_ILSVRC_mp.py --run_type val --val_tar data/ILSVRC2012_img_val.tar \\
      --valprep_script data/valprep.sh --output_dir data --verify

The layout is detected: a tar of class tars, a tree, a flat validation tar, a .tar.gz, Kaggle's zip.
After an interruption or a kill, run the same command again: it continues. You can also train from
the tars without unpacking them: see scripts/index_tar.py.
"""


def main() -> int:
    """Extracts what the flags ask for, and logs one line per split about the result."""
    args = _parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    jobs = _jobs(args)
    for job in jobs:
        with measure_stage("extract", args.record or args.output_dir) as stage:
            with ByteMeter(job.split, sys.stderr) as meter:
                result = extract_archive(job, meter.start, meter.update)
            stage.extra = {
                "split": job.split,
                "images": result.num_images,
                "image_bytes": result.num_bytes,
                "image_bytes_written": result.num_bytes_written,
            }
        log.info("%s: %s", args.output_dir / job.split, result.describe())
    return 0


def _jobs(args: argparse.Namespace) -> list[Extraction]:
    """One extraction for each split; all flags are checked before the first one starts."""
    splits: tuple[Split, ...] = ("train", "val") if args.run_type == "all" else (args.run_type,)
    archives = {"train": args.train_tar, "val": args.val_tar}
    for split in splits:
        if archives[split] is None:
            raise UserError(
                f"--run_type {args.run_type} needs --{split}_tar; give it, or another --run_type"
            )
        if not archives[split].is_file():
            raise UserError(f"no such file: {archives[split]}; check --{split}_tar")
    if args.valprep_script is not None and not args.valprep_script.is_file():
        raise UserError(f"no such file: {args.valprep_script}; check --valprep_script")
    if args.md5 is not None and len(splits) > 1:
        raise UserError("--md5 is that of one archive; add --run_type train or --run_type val")
    return [
        Extraction(
            archive=archives[split],
            split=split,
            output_dir=args.output_dir,
            num_threads=args.num_threads,
            labels=args.valprep_script if split == "val" else None,
            md5=args.md5,
            verify=args.verify,
            keep_going=args.keep_going,
        )
        for split in splits
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--train_tar", type=Path, help="ILSVRC2012_img_train.tar, or a zip or .tar.gz of it")
    add("--val_tar", type=Path, help="ILSVRC2012_img_val.tar, or a zip or .tar.gz of it")
    add("--output_dir", type=Path, required=True, help="folder that train/ and val/ are made in")
    add(
        "--valprep_script",
        type=Path,
        help="valprep.sh or LOC_val_solution.csv with the labels of val (read, never run); "
        "default: one beside the archive or in the zip, else the built-in labels of the real set",
    )
    add("--num_threads", type=int, default=_num_cpus(), help="default: one per core")
    add("--run_type", choices=("all", "train", "val"), default="all", help="default: all")
    add("--md5", metavar="HEX", help="the MD5 that the archive must have")
    add(
        "--verify",
        action="store_true",
        help="check a real ILSVRC2012 archive against its published checksum while extracting, and "
        "the sizes of the files that were extracted before",
    )
    add("--keep_going", action="store_true", help="skip damaged classes; the exit code is still 3")
    add("--record", type=Path, metavar="DIR", help="folder for stages.jsonl; default: output_dir")
    return parser


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    sys.exit(run_command(main))
