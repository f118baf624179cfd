"""The images of a tar that is still arriving: a read waits until its bytes are here (no torch).

The tar is the partial file of a fetch, full of holes at first. A map says which MiB are here and
verified (dataset/stream/arrivals.py). It is looked at before a read and after it, so the zeros of a
hole are never an image.
"""

from __future__ import annotations

import math
import os
import time

from dataset.archive.index_file import TarIndex
from dataset.errors import DataError, PassingError
from dataset.own_names import part_path
from dataset.stream.arrivals import Arrivals, State
from train.data.network_meter import NetworkMeter
from train.data.sampler import Int64s
from train.data.sources import FileIdentity, TarSource

NETWORK = "The network has not brought it yet."
FIRST_PAUSE_S, MAX_PAUSE_S = 0.001, 0.05


class Starved(PassingError):
    """What the training needs next does not come: a run that has moved is saved first."""


class StreamSource(TarSource):
    """The images of an indexed tar, as they arrive; safe over fork and spawn as a TarSource is."""

    keeps_all = True  # the tar will be whole

    def __init__(
        self, index: TarIndex, arrivals: Arrivals, meter: NetworkMeter, local_rank: int = 0
    ) -> None:
        self.arrivals = arrivals
        self.count_on(meter, local_rank)
        super().__init__(index)

    def count_on(self, meter: NetworkMeter, local_rank: int, max_wait_s: float = math.inf) -> None:
        """Reads count on the meter of this rank, and wait no longer than that."""
        self._meter, self._local_rank, self._max_wait_s = meter, local_rank, max_wait_s

    def explain_wait(self, index: int) -> str:
        offset, size = int(self.index.offset[index]), int(self.index.size[index])
        is_here = self.arrivals.has(offset, offset + size)
        return super().explain_wait(index) if is_here else NETWORK

    @property
    def proofs(self) -> tuple[Int64s, Int64s]:
        """The bytes [begin, end) that prove the class of each class tar."""
        return self._headers.proofs

    def list_unproven(self) -> list[str]:
        """The classes whose class tar cannot be looked at yet; raises for a wrong one."""
        return self._headers.prove_classes(self._pread, self.arrivals.has)

    def ask_for_proofs(self) -> None:
        """Does nothing: what proves the classes comes by itself, as everything does."""

    def wait_for_proofs(self) -> None:
        """Returns when every class is proven."""
        for begin, end in zip(*(places.tolist() for places in self.proofs), strict=True):
            self._wait_for(begin, end)
        if self.list_unproven():  # the headers of all class tars decide
            self._wait_for(0, self.index.tar_size)
            self.list_unproven()

    def check_unchanged(self) -> None:
        """Raises if another file has the tar's place, or if the fetcher found it to be wrong."""
        failure = self.arrivals.failure
        if isinstance(failure, DataError):
            raise failure
        if self._fd is None:
            return  # perhaps there is no file yet
        if not self._first_seen.mtime_ns and self.arrivals.state is State.WHOLE:
            self._first_seen = self._first_seen._replace(mtime_ns=self._identify().mtime_ns)
        super().check_unchanged()

    def _identify(self) -> FileIdentity:
        """Its times count only when it is whole: until then they change all the time."""
        if self._fd is None:
            return FileIdentity(0, 0, 0)
        is_whole = self.arrivals.state is State.WHOLE
        try:
            found = part_path(self.index.tar).stat()
        except FileNotFoundError:
            found = self.index.tar.stat()
        return FileIdentity(found.st_ino, found.st_size, found.st_mtime_ns if is_whole else 0)

    def _open(self) -> int:
        """The descriptor of the partial file, which it keeps when that gets its final name."""
        if self._fd is None:
            try:
                fd = os.open(part_path(self.index.tar), os.O_RDONLY | os.O_NONBLOCK)
            except FileNotFoundError:
                fd = os.open(self.index.tar, os.O_RDONLY | os.O_NONBLOCK)
            found = os.fstat(fd)
            self._first_seen = FileIdentity(found.st_ino, found.st_size, 0)
            self._fd = fd  # last: other threads look at it first
        return self._fd

    def _read_bytes(self, size: int, offset: int, where: str, ahead: int) -> bytes:
        begin, end = offset - ahead, offset + size
        if self.arrivals.has(begin, end):
            self._meter.count_hit()
        while True:
            self._wait_for(begin, end)
            data = super()._read_bytes(size, offset, where, ahead)
            if self.arrivals.has(begin, end):  # not taken back since
                return data

    def _pread(self, size: int, offset: int) -> bytes:
        end = min(offset + size, self.index.tar_size)
        while True:
            self._wait_for(offset, end)
            data = super()._pread(size, offset)
            if self.arrivals.has(offset, end):
                return data

    def _compare(self, index: int, header: bytes) -> None:
        self._headers.check(index, header, self._pread, self.arrivals.has)

    def _wait_for(self, begin: int, end: int) -> None:
        """Returns when some bytes are here; raises when no more will come."""
        if self.arrivals.has(begin, end):
            return
        pause_s, begin_s = FIRST_PAUSE_S, time.monotonic()
        with self._meter.waiting(self._tell_waiting):
            while not self.arrivals.has(begin, end):
                failure = self.arrivals.failure
                if isinstance(failure, PassingError):
                    raise Starved(str(failure))
                if failure is not None:
                    raise failure
                if time.monotonic() - begin_s > self._max_wait_s:
                    raise Starved(
                        f"the network has not brought the bytes {begin}-{end - 1} of "
                        f"{self.index.tar.name} in {self._max_wait_s:.0f} s, and the other ranks "
                        "wait no longer (--timeout-minutes); run the same command again"
                    )
                self._ask(begin, end)
                time.sleep(pause_s)
                pause_s = min(MAX_PAUSE_S, 1.5 * pause_s)

    def _ask(self, begin: int, end: int) -> None:
        """Does nothing: all of the tar comes, by need."""

    def _tell_waiting(self, change: int) -> None:
        rank, arrivals = self._local_rank, self.arrivals
        arrivals.note_waiting(rank, int(arrivals.cursors[rank, 1]) + change)
