"""The index of a tar that stays where it is: one pass over the network, little disk and memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dataset.archive.block_sums import BlockSums
from dataset.archive.index import guess_split, name_labels, pack_index, suffices
from dataset.archive.index_file import TarIndex, load_by_size, make_index, write_whole
from dataset.archive.labels import label_table, label_val
from dataset.archive.stream_walk import StreamWalk
from dataset.archive.unit_sums import sum_units
from dataset.durable import lock_file
from dataset.errors import DataError, PassingError, UserError
from dataset.federation.lookup import Lookup
from dataset.federation.pelican import Target
from dataset.federation.reach import check_network
from dataset.fetch.ledger import make_folder
from dataset.fetch.request import Request
from dataset.fetch.size import find_size
from dataset.names import INDEX_SUFFIX
from dataset.own_names import check_no_part, part_path
from dataset.redaction import printable
from dataset.stream.forward_pass import ForwardPass
from dataset.stream.pass_state import discard_state, read_state
from dataset.transfer.engine import ObjectChanged, OtherSizes, Transfer

log = logging.getLogger("trainyard.index")

MAX_STARTS = 5  # of an object that changes again and again while it is read
Tick = Callable[[Transfer], None]


@dataclass(frozen=True)
class IndexJob:
    """One object to index, and what its index shall have."""

    target: Target
    folder: Path  # for the index
    labels: Path | None = None
    checksums: bool = False

    def __post_init__(self) -> None:
        if self.target.scheme == "file":
            raise UserError(f"{self.target.path} is a file; give its path, not its URL")
        check_no_part(Path(self.target.name))

    @property
    def tar(self) -> Path:
        """Where the tar would lie if it were here: label files are looked for beside it."""
        return self.folder / self.target.name

    @property
    def place(self) -> Path:
        return self.tar.with_name(self.tar.name + INDEX_SUFFIX)


@dataclass(frozen=True)
class IndexedUrl:
    """The index of a URL, how many bytes came for it, and what vouches for them."""

    index: TarIndex
    place: Path
    size: int
    is_new: bool = True
    fetched_bytes: int = 0
    verified: str = ""  # empty when nothing does
    is_md5_lost: bool = False  # a published one: an earlier start's was not continued


def index_url(job: IndexJob, request: Request, on_tick: Tick = lambda transfer: None) -> IndexedUrl:
    """Writes the index of an object that is read once, from its start to its end.

    What was reached is saved: the same command goes on after a kill. An index of an object of this
    size that has what is asked for is taken as it is.
    """
    make_folder(job.folder)
    if not os.access(job.folder, os.W_OK):
        raise UserError(f"{job.folder} cannot be written to; choose another --index-dir")
    label_table(job.tar, job.labels)  # a broken one is refused before the pass, not after it
    check_network(job.target.discovery or job.target.url)
    with _holding(job.place), Lookup(job.target, request.access, request.options) as lookup:
        for _ in range(MAX_STARTS):
            known = read_state(job.place, job.target.identity)
            size = find_size(lookup, known[0].size if known else None)
            present = load_by_size(job.place, job.tar, size)
            if present is not None and suffices(present, job.labels, job.checksums):
                return IndexedUrl(present, job.place, size, is_new=False)
            try:
                return _index_once(job, lookup, size, on_tick)
            except ObjectChanged as error:
                log.info(
                    "the object changed at its source (%s); asking again", printable(str(error))
                )
                if not isinstance(error, OtherSizes):  # of the wrong size is perhaps one answer
                    discard_state(job.place)
                lookup.servers.forget()
    raise PassingError(f"{job.target.identity} keeps changing at its source; try again later")


@contextmanager
def _holding(place: Path) -> Iterator[None]:
    """Keeps other passes away, which would remove each other's states."""
    lock = place.with_name(f"{part_path(place).name}.lock")
    try:
        fd, _ = lock_file(lock)
    except BlockingIOError:
        raise PassingError(f"{place} is being made by another process; try again") from None
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(fd)


def _index_once(job: IndexJob, lookup: Lookup, size: int, on_tick: Tick) -> IndexedUrl:
    walk = StreamWalk(Path(job.target.name), size)
    forward = ForwardPass(lookup, job.place, size, walk)
    try:
        forward.run(on_tick)
        verified = forward.verify()
        listing = walk.list_images(
            guess_split(job.tar), partial(label_val, archive=job.tar, labels=job.labels)
        )
    except DataError:  # perhaps a cache is to blame: what it sent is not used again
        discard_state(job.place)
        raise
    sums = unit_sums = None
    if job.checksums:
        sums = BlockSums("crc32", forward.sums_of("crc32"))
        places = listing.offset, listing.size, listing.label, size
        unit_sums = sum_units(*places, forward.prefix)
    labels_from = name_labels(job.tar, job.labels)
    headers = walk.first_header, walk.last_header
    arrays = pack_index(listing, size, sums, labels_from, headers, unit_sums)
    write_whole(arrays, job.place)
    discard_state(job.place)
    num_bytes = sum(server.bytes for server in lookup.servers.all)
    return IndexedUrl(
        make_index(arrays, job.tar),
        job.place,
        size,
        fetched_bytes=num_bytes,
        verified=verified,
        is_md5_lost=forward.is_md5_lost,
    )
