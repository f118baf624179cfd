#!/usr/bin/env python3
"""Writes TAR.index for each tar, so that training reads its images from the tar, not unpacked."""

from __future__ import annotations

import errno
import logging
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dataset.packages import require_packages

require_packages("numpy")

from dataset.archive.index import (
    build_index,
    check_kind,
    find_current,
    find_index,
    verify_tar,
)
from dataset.archive.index_file import TarIndex, load_index
from dataset.archive.tar_images import detect_kind
from dataset.byte_meter import ByteMeter
from dataset.durable import writing_whole
from dataset.errors import DataError, UserError, run_command
from dataset.fetch.display import Display
from dataset.fetch.ledger import make_folder
from dataset.fetch.request import Request
from dataset.flags import REQUIRED, flag, make_parser, parse_flags
from dataset.known_archives import find_published
from dataset.names import INDEX_SUFFIX
from dataset.redaction import printable, redact
from dataset.stream.index_url import IndexedUrl, IndexJob, index_url
from dataset.words import count
from train.records.stage_meter import measure_stage

log = logging.getLogger("trainyard")
PROVEN = "its MD5 is the published one"
UNPROVEN = "only its headers were read; --checksums compares all of it with the published MD5"
NO_CHECKSUM = "no server offers a checksum to compare"
MD5_LOST = "the pass was resumed, and its MD5 is not known without libcrypto in both starts"
EXAMPLE = """examples:
  python scripts/index_tar.py data/ILSVRC2012_img_train.tar data/ILSVRC2012_img_val.tar
  python scripts/index_tar.py --checksums data/ILSVRC2012_img_train.tar    reads all bytes once
  python scripts/index_tar.py --verify data/ILSVRC2012_img_train.tar       names damaged bytes
  python scripts/index_tar.py --checksums osdf:///nrp/osdf/ILSVRC2012/ILSVRC2012_img_train.tar

The index is written beside the tar, or to --index-dir; if the tar's folder is read-only, to your
cache folder. `python -m train data` makes it on first use, too. Without --checksums only the
headers of a tar are read. With it, a published ILSVRC2012 archive must have its published MD5.

The index of a URL is written to --index-dir, or to the current folder. All bytes pass once, and
none are kept: it is built to stay below 0.5 GB of memory and 1 GB of disk. A published archive must
have its MD5. Run the same command again to continue after a kill. docs/formats.md has the details.
"""


@dataclass(frozen=True, kw_only=True)
class IndexFlags:
    """The flags of scripts/index_tar.py."""

    tars: tuple[str, ...] = flag(
        REQUIRED,
        "an uncompressed tar: its path, or an osdf, pelican, https or http URL",
        "TAR_OR_URL",
        nargs="+",
    )
    labels: Path | None = flag(
        None,
        "valprep.sh or LOC_val_solution.csv for a flat tar; default: one beside the tar (of a URL: "
        "in the folder of the index), else the built-in labels of the real set",
        metavar="FILE",
    )
    checksums: bool = flag(False, "also store a checksum of every MiB and every unit")
    verify: bool = flag(False, "compare the tar with the checksums of its index")
    index_dir: Path | None = flag(
        None, "folder for the indexes; default: the tar's, of a URL the current one", metavar="DIR"
    )
    record: Path | None = flag(None, "folder for stages.jsonl; default: the index's", metavar="DIR")
    federation: str | None = flag(
        None, "discovery host for osdf:// URLs (default https://osg-htc.org)", metavar="URL"
    )
    token: Path | None = flag(
        None, "file with a bearer token for a URL (default: see docs/fetch.md)", metavar="FILE"
    )

    def record_folder(self, tar: Path) -> Path | None:
        """Where the line of the stage goes: --record, else the folder of the index, if writable."""
        folder = self.record or self.index_dir or tar.resolve().parent
        return folder if self.record or not folder.exists() or os.access(folder, os.W_OK) else None


def main() -> int:
    """Indexes, or verifies, one tar after the other."""
    flags = parse_flags(IndexFlags, make_parser(__doc__, EXAMPLE))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for tar in flags.tars:
        _check_input(tar, flags)
    for tar in flags.tars:
        if _is_url(tar):
            _index_url(tar, flags)
        else:
            (_verify if flags.verify else _index)(Path(tar), flags)
    return 0


def _check_input(tar: str, flags: IndexFlags) -> None:
    """Refuses what is no tar before any work begins; only work leaves a line in stages.jsonl."""
    if _is_url(tar):
        if flags.verify:
            raise UserError("--verify compares a tar on the disk with its index; give its path")
        _make_job(tar, _make_request(flags), flags)
        return
    if Path(tar).is_dir():
        example = Path(tar, "ILSVRC2012_img_train.tar")
        raise UserError(f"{tar} is a folder; name the tar in it, such as {example}")
    if not Path(tar).is_file():
        raise UserError(f"no such file: {tar}; give the path of an uncompressed tar")
    if not flags.verify:  # which names the damaged bytes, be they the first
        check_kind(detect_kind(Path(tar)), Path(tar))


def _is_url(tar: str) -> bool:
    return "://" in tar and not Path(tar).exists()


def _index(tar: Path, flags: IndexFlags) -> None:
    if flags.index_dir is not None:
        _check_folder(flags.index_dir)
    if (place := _find_up_to_date(tar, flags)) is not None:
        if flags.index_dir is not None and place.parent != flags.index_dir:
            place = _copy(place, flags.index_dir / (tar.name + INDEX_SUFFIX))
        log.info("%s: the index is up to date: %s", tar, place)
        return
    start_s = time.monotonic()
    with measure_stage("index", flags.record_folder(tar)) as stage:
        with ByteMeter(tar.name, sys.stderr) as meter:
            if flags.checksums:
                meter.start(tar.stat().st_size)
            index, place = build_index(
                tar,
                index_dir=flags.index_dir,
                labels=flags.labels,
                checksums=flags.checksums,
                progress=meter.update,
            )
        stage.extra = {"images": len(index), "checksums": flags.checksums}
    _tell(index, place, time.monotonic() - start_s)
    if find_published(tar.name, tar.stat().st_size):
        log.info("%s: %s", tar, PROVEN if flags.checksums else UNPROVEN)


def _check_folder(folder: Path) -> None:
    """Refuses a folder that was asked for and cannot be written, before the work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(folder, os.W_OK) else os.strerror(errno.EACCES)
    except OSError as error:
        reason = str(error.strerror)
    if reason:
        raise UserError(f"--index-dir {folder} cannot be written ({reason}); give another folder")


def _tell(index: TarIndex, place: Path, seconds: float) -> None:
    log.info(
        "%s: %s, %s in %.2f s (%.2f µs per image)",
        place,
        count(len(index.classes), "class", "classes"),
        count(len(index), "image"),
        seconds,
        1e6 * seconds / len(index),
    )


def _make_request(flags: IndexFlags) -> Request:
    folder = flags.index_dir or Path()
    return Request(folder, federation=flags.federation, token=flags.token)


def _make_job(url: str, request: Request, flags: IndexFlags) -> IndexJob:
    return IndexJob(request.parse(url), request.out, flags.labels, flags.checksums)


def _index_url(url: str, flags: IndexFlags) -> None:
    request = _make_request(flags)
    job = _make_job(url, request, flags)
    display, start_s = Display(sys.stderr), time.monotonic()
    with measure_stage("index", flags.record_folder(job.tar)) as stage:
        try:
            found = index_url(job, request, display.show)
        finally:
            display.close()
        stage.extra = {
            "images": len(found.index),
            "checksums": flags.checksums,
            "bytes_fetched": found.fetched_bytes,
        }
    name, seconds = printable(redact(job.target.identity)), time.monotonic() - start_s
    if not found.is_new:
        log.info(
            "%s: %s is of an object of this size; remove it to make it again", name, found.place
        )
        return
    _tell(found.index, found.place, seconds)
    rate = found.fetched_bytes / seconds / 1e6
    log.info("%s: %d bytes, %.1f MB/s, %s", name, found.size, rate, _describe_proof(found))


def _describe_proof(found: IndexedUrl) -> str:
    """What vouches for the bytes of a URL, or why nothing does."""
    if found.verified:
        return f"verified by {found.verified}"
    return f"not verified: {MD5_LOST if found.is_md5_lost else NO_CHECKSUM}"


def _find_up_to_date(tar: Path, flags: IndexFlags) -> Path | None:
    """The index, if it is newer than the tar, belongs to it and has what the flags ask for."""
    place = find_index(tar, flags.index_dir)
    if place is None or place.stat().st_mtime_ns < tar.stat().st_mtime_ns:
        return None
    try:
        current = find_current(
            tar, index_dir=flags.index_dir, labels=flags.labels, checksums=flags.checksums
        )
    except DataError:
        return None  # of another tar, or damaged: the new one replaces it
    return place if current is not None else None


def _copy(cached: Path, place: Path) -> Path:
    """Copies an index from another of its places to the folder that was asked for."""
    make_folder(place.parent)
    with writing_whole(place) as file:
        file.write(cached.read_bytes())
    return place


def _verify(tar: Path, flags: IndexFlags) -> None:
    place = find_index(tar, flags.index_dir)
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


if __name__ == "__main__":
    sys.exit(run_command(main))
