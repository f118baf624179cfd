"""Extraction: an archive's images into class folders, in one threaded pass that may be killed."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dataset.archive.copy_images import CopyImages, TarCopier, ZipCopier
from dataset.archive.extract_gzip import extract_stream
from dataset.archive.labels import find_labels, label_val
from dataset.archive.listing import Listing, Problems, Split
from dataset.archive.output_folder import OutputFolder
from dataset.archive.tar_images import detect_kind, list_tar
from dataset.archive.write_classes import CopyPlan, CountImages, Written, write_images
from dataset.archive.zip_directory import find_member, list_zip, read_directory, read_member
from dataset.durable import find_room
from dataset.errors import DataError, UserError
from dataset.known_archives import Digest, WrongDigest, check_digest, expected_digest, recognise
from dataset.names import SOLUTION
from dataset.words import count

_GZIP_NAMES = (".gz", ".tgz")

Start = Callable[[int, int], object]  # (bytes, images) to be written


@dataclass(frozen=True)
class Extraction:
    """What to extract, and how."""

    archive: Path
    split: Split
    output_dir: Path
    num_threads: int = 2
    labels: Path | None = None
    md5: str | None = None
    verify: bool = False
    keep_going: bool = False

    def __post_init__(self) -> None:
        if self.num_threads < 1:
            raise UserError(f"--num_threads {self.num_threads}: must be at least 1")


@dataclass(frozen=True)
class Result:
    """What is in the folder now, and what this run did for it."""

    num_classes: int
    num_images: int
    num_bytes: int
    num_skipped: int  # files of the archive that are no images
    checked: str  # the kind of checksum that was right
    seconds: float = 0.0
    num_bytes_written: int = 0

    def describe(self) -> str:
        """The summary line of a run."""
        rate = self.num_bytes_written / 1e6 / max(self.seconds, 1e-9)
        text = (
            f"{count(self.num_classes, 'class', 'classes')}, {count(self.num_images, 'image')}, "
            f"{self.num_bytes} bytes "
            f"in {self.seconds:.2f} s ({rate:.0f} MB/s)"
        )
        if self.num_bytes_written < self.num_bytes:
            text += f", {self.num_bytes - self.num_bytes_written} bytes were there already"
        if self.num_skipped:
            skipped = count(
                self.num_skipped, "file that is not an image", "files that are not images"
            )
            text += f", {skipped} left out"
        return text + (f", {self.checked} verified" if self.checked else "")


def extract_archive(
    job: Extraction,
    start: Start = lambda num_bytes, num_images: None,
    progress: CountImages = lambda num_bytes, num_images: None,
) -> Result:
    """Fills output_dir/split from an archive; a second call finds the work done.

    `start` is told how much there is to write, `progress` what was written, a class at a time.
    """
    start_s = time.monotonic()
    digest = expected_digest(job.archive, job.md5, job.verify)
    kind = detect_kind(job.archive)
    if kind == "gzip" and not job.archive.name.endswith(_GZIP_NAMES):
        raise UserError(
            f"{job.archive} is gzip-compressed, though its name says otherwise; "
            f"rename it to {job.archive.stem}.tar.gz, or gunzip it"
        )
    if kind == "gzip" and job.keep_going:
        raise UserError(
            f"--keep_going does not work for {job.archive}: a gzip cannot be read beyond damage; "
            "gunzip what can be read first"
        )
    identity = identify(job)
    with OutputFolder(job.output_dir, job.split) as folder:
        facts = folder.take_up(identity, recheck=digest is not None)
        if facts:
            return Result(**facts["result"], seconds=time.monotonic() - start_s)
        extract = _extract_streamed if kind == "gzip" else _extract_planned
        written = extract(job, folder, identity, digest, start, progress)
        if written.problems:
            raise DataError(describe_problems(written.problems, job.archive))
        facts = {
            "num_classes": len(written.counts),
            "num_images": sum(written.counts.values()),
            "num_bytes": written.num_bytes,
            "num_skipped": written.num_skipped,
            "checked": digest.kind if digest else "",
        }
        folder.finish(identity, written.counts, facts)
    seconds = time.monotonic() - start_s
    return Result(**facts, seconds=seconds, num_bytes_written=written.num_bytes_written)


def identify(job: Extraction) -> dict[str, Any]:
    """What distinguishes this archive and its labels from others, without reading all of it."""
    stat = job.archive.stat()
    labels = job.labels or (find_labels(job.archive.parent) if job.split == "val" else None)
    text = hashlib.sha256(labels.read_bytes()).hexdigest() if labels else ""
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "labels_sha256": text}


def describe_problems(problems: Sequence[str], archive: Path) -> str:
    """One line for all problems of an extraction that continued after them."""
    more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
    told = count(len(problems), "problem")
    return f"{archive}: {told}, the rest is extracted: {'; '.join(problems[:3])}{more}"


def _extract_planned(
    job: Extraction,
    folder: OutputFolder,
    identity: Mapping[str, Any],
    digest: Digest | None,
    start: Start,
    progress: CountImages,
) -> Written:
    """Extracts a tar or a zip, whose headers are all read before anything is written."""
    stop = threading.Event()
    problems: Problems | None = [] if job.keep_going else None
    with open_plan(job, problems, stop) as plan:
        listing = plan.listing
        folder.begin(identity)
        done = folder.finished(listing.classes, plan.sizes_of)
        if digest is None:
            folder.publish_staged(done)
        is_todo = np.array([wnid not in done for wnid in listing.classes])
        todo = np.flatnonzero(is_todo[listing.label])
        sizes = listing.size[todo]
        _check_room(folder.final, sizes, int(is_todo.sum()))
        start(int(sizes.sum()), len(todo))
        check = partial(check_digest, job.archive, digest, stop.is_set) if digest else None
        try:
            write_images(plan, folder, todo, job.num_threads, check, problems, stop, progress)
        except WrongDigest:
            folder.discard()
            raise
        if digest is not None:
            folder.publish_staged(listing.classes)
        counts = np.bincount(listing.label, minlength=len(listing.classes)).tolist()
        return Written(
            dict(zip(listing.classes, counts, strict=True)),
            int(listing.size.sum()),
            int(sizes.sum()),
            listing.num_skipped,
            problems or [],
        )


def _extract_streamed(
    job: Extraction,
    folder: OutputFolder,
    identity: Mapping[str, Any],
    digest: Digest | None,
    start: Start,
    progress: CountImages,
) -> Written:
    """Extracts a .tar.gz; its checksum comes last, so no class gets its final name before that."""
    folder.begin(identity)
    _check_room(folder.final, np.array([identity["size"]]), 0)  # images hardly shrink in a gzip
    start(0, 0)
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        check = pool.submit(check_digest, job.archive, digest, stop.is_set) if digest else None
        try:
            written = extract_stream(job.archive, job.split, job.labels, folder, progress)
            if check is not None:
                check.result()
        except WrongDigest:
            folder.discard()
            raise
        except BaseException:
            stop.set()
            raise
    folder.publish_staged(list(written.counts))
    return written


@contextmanager
def open_plan(
    job: Extraction, problems: Problems | None, stop: threading.Event
) -> Iterator[CopyPlan]:
    """The plan of a tar or a zip, whose file stays open meanwhile."""
    labels = partial(label_val, archive=job.archive, labels=job.labels, problems=problems)
    fd = os.open(job.archive, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if detect_kind(job.archive) == "zip":
            directory = read_directory(fd, job.archive)
            row = find_member(directory, SOLUTION.encode())
            if row is not None:
                text = read_member(fd, directory, row, job.archive).decode("utf-8", "replace")
                labels = partial(labels, inside=(SOLUTION, text))
            listing = list_zip(directory, job.archive, job.split, labels)
            copy: CopyImages = ZipCopier(fd, job.archive, listing, stop, directory)
        else:
            listing = list_tar(fd, job.archive, job.split, labels, problems=problems)
            copy = TarCopier(fd, job.archive, listing, stop)
        if not problems:
            check_published_counts(job.archive, listing)
        yield CopyPlan(listing, copy)
    finally:
        os.close(fd)


def check_published_counts(archive: Path, listing: Listing) -> None:
    """Refuses a file with the size of a real archive but other numbers of classes or images."""
    known = recognise(archive)
    num_classes, num_images = len(listing.classes), len(listing.names)
    if known and (known.num_classes, known.num_images) != (num_classes, num_images):
        raise DataError(
            f"{archive} has the size of {known.file} but {num_classes} classes and {num_images} "
            f"images, not {known.num_classes} and {known.num_images}; fetch it again"
        )


def _check_room(folder: Path, sizes: npt.NDArray[np.int64], num_folders: int) -> None:
    """Raises UserError unless the filesystem has the bytes and the inodes that files need."""
    free, free_files, block = find_room(folder)
    needed = int((-(-sizes // block)).sum()) * block
    if needed > free:
        raise UserError(
            f"{folder} has {free / 1e9:.2f} GB free, but the images need {needed / 1e9:.2f} GB; "
            "free some space or choose another --output_dir"
        )
    num_files = len(sizes) + num_folders
    if free_files is not None and num_files > free_files:
        raise UserError(
            f"{folder} has {free_files} free inodes, but the data needs {num_files}; "
            "choose another --output_dir, or train from the tar (scripts/index_tar.py)"
        )
