"""Threads that write an archive's images; a class folder gets its final name when complete."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dataset.archive.copy_images import CopyImages
from dataset.archive.listing import Listing, Problems
from dataset.archive.output_folder import OutputFolder, Sizes
from dataset.errors import DataError
from dataset.known_archives import WrongDigest

_UNIT = 128  # images a worker takes at once when the archive mixes its classes

CountImages = Callable[[int, int], object]  # (bytes, images) just written
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class CopyPlan:
    """An archive whose headers have all been checked, and the way to copy its images."""

    listing: Listing
    copy: CopyImages

    def sizes_of(self, wnid: bytes) -> Sizes:
        """File name -> size of the images of a class."""
        k = self.listing.classes.index(wnid)
        first, last = np.searchsorted(self.listing.label, [k, k + 1]).tolist()
        sizes = self.listing.size[first:last].tolist()
        return dict(zip(self.listing.names[first:last], sizes, strict=True))

    def paths(self, rows: Rows) -> list[bytes]:
        """CLASS/IMAGE of each image."""
        classes, names = self.listing.classes, self.listing.names
        labels = self.listing.label[rows].tolist()
        return [classes[k] + b"/" + names[i] for k, i in zip(labels, rows.tolist(), strict=True)]


@dataclass(frozen=True)
class Written:
    """What an extraction's folder holds now, and how much of it this run wrote."""

    counts: dict[bytes, int]  # class -> images
    num_bytes: int
    num_bytes_written: int
    num_skipped: int
    problems: Problems = field(default_factory=list)


def write_images(
    plan: CopyPlan,
    folder: OutputFolder,
    todo: Rows,
    num_threads: int,
    check: Callable[[], None] | None,
    problems: Problems | None,
    stop: threading.Event,
    progress: CountImages,
) -> None:
    """Writes the images `todo`; each class is published when it is complete.

    With a `check` of the whole archive, which runs in parallel, classes are only staged: the
    caller publishes them when this function returns. With `problems` a class that cannot be
    read is noted there and the others continue.
    """
    listing = plan.listing
    missing = np.bincount(listing.label[todo], minlength=len(listing.classes))
    for k in np.flatnonzero(missing).tolist():
        (folder.run / os.fsdecode(listing.classes[k])).mkdir()
    name_class = folder.publish if check is None else folder.stage
    with _open_folder(folder.run) as dir_fd, _pool(num_threads + (check is not None), stop) as pool:

        def copy(rows: Rows) -> Rows:
            try:
                plan.copy(dir_fd, plan.paths(rows), rows)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(folder.final)) from error
            return rows

        jobs: list[Future[Rows | None]] = [pool.submit(check)] if check else []
        jobs += [pool.submit(copy, unit) for unit in cut_units(todo, listing)]
        for job in as_completed(jobs):
            rows = _result(job, problems)
            if rows is None:
                continue
            progress(int(listing.size[rows].sum()), len(rows))
            for k, num in zip(*np.unique(listing.label[rows], return_counts=True), strict=True):
                missing[k] -= num
                if missing[k] == 0:
                    name_class(listing.classes[k])


def _result(job: Future[Rows | None], problems: Problems | None) -> Rows | None:
    """The images that a job has written; its error is raised here, or noted."""
    try:
        return job.result()
    except DataError as error:
        if problems is None or isinstance(error, WrongDigest):
            raise
        problems.append(str(error))
        return None


@contextmanager
def _pool(num_threads: int, stop: threading.Event) -> Iterator[ThreadPoolExecutor]:
    """A thread pool that is stopped and waited for when an error leaves the block."""
    with ThreadPoolExecutor(num_threads) as pool:
        try:
            yield pool
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


@contextmanager
def _open_folder(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def cut_units(todo: Rows, listing: Listing) -> Sequence[Rows]:
    """The images `todo` in the order of the archive, cut into pieces of work.

    A piece is a class where the archive keeps classes together: two threads then never create
    files in one folder at the same time.
    """
    if len(todo) == 0:
        return []
    rows = todo[np.argsort(listing.offset[todo], kind="stable")]
    changes = np.flatnonzero(np.diff(listing.label[rows])) + 1
    if len(changes) < len(np.unique(listing.label[rows])):
        return np.split(rows, changes)
    return np.split(rows, np.arange(_UNIT, len(rows), _UNIT))
