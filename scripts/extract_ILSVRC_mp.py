#!/usr/bin/env python3
"""Extracts the ILSVRC archives into class folders: one pass, in parallel, resumable, checked."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dataset.packages import require_packages

require_packages("numpy")

from dataset.archive.extract import Extraction, extract_archive
from dataset.archive.listing import Split
from dataset.byte_meter import ByteMeter
from dataset.errors import UserError, run_command
from dataset.flags import REQUIRED, flag, make_parser, parse_flags
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


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, kw_only=True)
class ExtractFlags:
    """The flags of scripts/extract_ILSVRC_mp.py."""

    train_tar: Path | None = flag(
        None, "ILSVRC2012_img_train.tar, or a zip or .tar.gz of it", "--train_tar"
    )
    val_tar: Path | None = flag(
        None, "ILSVRC2012_img_val.tar, or a zip or .tar.gz of it", "--val_tar"
    )
    output_dir: Path = flag(REQUIRED, "folder that train/ and val/ are made in", "--output_dir")
    valprep_script: Path | None = flag(
        None,
        "valprep.sh or LOC_val_solution.csv with the labels of val (read, never run); "
        "default: one beside the archive or in the zip, else the built-in labels of the real set",
        "--valprep_script",
    )
    num_threads: int = flag(_num_cpus(), "default: one per core", "--num_threads")
    run_type: str = flag("all", "default: all", "--run_type", choices=("all", "train", "val"))
    md5: str | None = flag(None, "the MD5 that the archive must have", metavar="HEX")
    verify: bool = flag(
        False,
        "check a real ILSVRC2012 archive against its published checksum while extracting, and "
        "the sizes of the files that were extracted before",
    )
    keep_going: bool = flag(False, "skip damaged classes; the exit code is still 3", "--keep_going")
    record: Path | None = flag(None, "folder for stages.jsonl; default: output_dir", metavar="DIR")

    def __post_init__(self) -> None:
        """All flags are checked before the first split starts."""
        for split in self.splits:
            self._check_archive(split)
        if self.valprep_script is not None and not self.valprep_script.is_file():
            raise UserError(f"no such file: {self.valprep_script}; check --valprep_script")
        if self.md5 is not None and len(self.splits) > 1:
            raise UserError("--md5 is that of one archive; add --run_type train or --run_type val")

    def _check_archive(self, split: Split) -> None:
        archive = self.archives[split]
        if archive is None:
            raise UserError(
                f"--run_type {self.run_type} needs --{split}_tar; give it, or another --run_type"
            )
        if not archive.is_file():
            raise UserError(f"no such file: {archive}; check --{split}_tar")

    @property
    def splits(self) -> tuple[Split, ...]:
        both: tuple[Split, ...] = ("train", "val")
        return tuple(split for split in both if self.run_type in ("all", split))

    @property
    def archives(self) -> dict[Split, Path | None]:
        return {"train": self.train_tar, "val": self.val_tar}

    @property
    def jobs(self) -> list[Extraction]:
        """One extraction for each split."""
        return [
            Extraction(
                archive=archive,
                split=split,
                output_dir=self.output_dir,
                num_threads=self.num_threads,
                labels=self.valprep_script if split == "val" else None,
                md5=self.md5,
                verify=self.verify,
                keep_going=self.keep_going,
            )
            for split, archive in self.archives.items()
            if archive is not None and split in self.splits
        ]


def main() -> int:
    """Extracts what the flags ask for, and logs one line per split about the result."""
    flags = parse_flags(ExtractFlags, make_parser(__doc__, EXAMPLE))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for job in flags.jobs:
        with measure_stage("extract", flags.record or flags.output_dir) as stage:
            with ByteMeter(job.split, sys.stderr) as meter:
                result = extract_archive(job, meter.start, meter.update)
            stage.extra = {
                "split": job.split,
                "images": result.num_images,
                "image_bytes": result.num_bytes,
                "image_bytes_written": result.num_bytes_written,
            }
        log.info("%s: %s", flags.output_dir / job.split, result.describe())
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
