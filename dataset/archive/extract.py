"""Extraction: an archive's images into class folders, one pass, in threads, safe at any moment."""

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

from dataset.archive.tar_images import detect_kind, list_tar
from dataset.archive.copying import CopyImages, TarCopier, ZipCopier
from dataset.errors import DataError, UserError
from dataset.archive.extract_stream import extract_stream
from dataset.free_space import check_room
from dataset.archive.labels import SOLUTION, find_labels, label_val
from dataset.archive.listing import Listing, Problems, Split
from dataset.archive.output_folder import OutputFolder
from dataset.published import Digest, WrongDigest, check_digest, expected_digest, recognise
from dataset.archive.writing import Plan, Progress, Written, write_images
from dataset.archive.zip_directory import find_member, list_zip, read_directory, read_member

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
            raise UserError(f"--num_threads {self.num_threads}: at least 1 thread is needed")


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
            f"{self.num_classes} classes, {self.num_images} images, {self.num_bytes} bytes "
            f"in {self.seconds:.2f} s ({rate:.0f} MB/s)"
        )
        if self.num_bytes_written < self.num_bytes:
            text += f", {self.num_bytes - self.num_bytes_written} bytes were there already"
        if self.num_skipped:
            text += f", {self.num_skipped} files that are no images left out"
        return text + (f", {self.checked} verified" if self.checked else "")


def extract_archive(
    job: Extraction,
    start: Start = lambda num_bytes, num_images: None,
    progress: Progress = lambda num_bytes, num_images: None,
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
            f"--keep_going cannot be had for {job.archive}: behind a damaged place nothing of a "
            "gzip can be read; gunzip what there is first"
        )
    identity = identify(job)
    with OutputFolder(job.output_dir, job.split) as folder:
        facts = folder.is_done(identity, recheck=digest is not None)
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
    """What tells this archive and its labels from others, without reading it through."""
    stat = job.archive.stat()
    labels = job.labels or (find_labels(job.archive.parent) if job.split == "val" else None)
    text = hashlib.sha256(labels.read_bytes()).hexdigest() if labels else ""
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "labels_sha256": text}


def describe_problems(problems: Sequence[str], archive: Path) -> str:
    """One line for all that went wrong while the rest went on."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
    return f"{archive}: {count}, the rest is extracted: {'; '.join(problems[:3])}{more}"


def _extract_planned(
    job: Extraction,
    folder: OutputFolder,
    identity: Mapping[str, Any],
    digest: Digest | None,
    start: Start,
    progress: Progress,
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
        check_room(folder.final, sizes, int(is_todo.sum()))
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
    progress: Progress,
) -> Written:
    """Extracts a .tar.gz; its sums stand at its end, so no class has its final name before that."""
    folder.begin(identity)
    check_room(folder.final, np.array([identity["size"]]), 0)  # images hardly shrink in a gzip
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
def open_plan(job: Extraction, problems: Problems | None, stop: threading.Event) -> Iterator[Plan]:
    """The plan of a tar or a zip, its file held open."""
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
        yield Plan(listing, copy)
    finally:
        os.close(fd)


def check_published_counts(archive: Path, listing: Listing) -> None:
    """Refuses a file of a real archive's size that does not hold what the real one holds."""
    known = recognise(archive)
    num_classes, num_images = len(listing.classes), len(listing.names)
    if known and (known.num_classes, known.num_images) != (num_classes, num_images):
        raise DataError(
            f"{archive} has the size of {known.file} but {num_classes} classes and {num_images} "
            f"images, not {known.num_classes} and {known.num_images}; fetch it again"
        )
