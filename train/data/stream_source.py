"""The images of a tar that is still arriving: a read waits until its bytes are here (no torch).

The tar is the partial file of a fetch, full of holes at first. A map says which MiB are here and
verified (dataset/stream/arrivals.py). It is looked at before a read and after it, so the zeros of a
hole are never an image.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable

from dataset.archive.index_file import TarIndex
from dataset.archive.tar_header import BLOCK
from dataset.errors import DataError, PassingError, UserError
from dataset.own_names import part_path
from dataset.stream.arrivals import ArrivalMap, State
from train.data.network_meter import NetworkMeter
from train.data.sampler import Int64s
from train.data.sources import FileIdentity, TarSource

NETWORK = "The network has not brought it yet."
FIRST_PAUSE_S, MAX_PAUSE_S = 0.001, 0.05
LOOK_S = 1.0  # between two looks whether the fetcher is kept


class Starved(PassingError):
    """What the training needs next does not come: a run that has moved is saved first."""


class Refused(UserError):
    """The same until the user has fixed something: a token that expired, a full disk."""


class StreamSource(TarSource):
    """The images of an indexed tar, as they arrive; safe over fork and spawn as a TarSource is."""

    keeps_all = True  # the tar will be whole

    def __init__(
        self, index: TarIndex, arrivals: ArrivalMap, meter: NetworkMeter, local_rank: int = 0
    ) -> None:
        self.arrivals = arrivals
        self.count_on(meter, local_rank)
        super().__init__(index)

    def count_on(
        self,
        meter: NetworkMeter,
        local_rank: int,
        max_wait_s: float = math.inf,
        is_kept: Callable[[], bool] | None = None,
    ) -> None:
        """Reads count on the meter of this rank, and wait no longer than that.

        is_kept: whether the process that keeps the fetcher lives, where nobody else would tell.
        """
        self._meter, self._local_rank, self._max_wait_s = meter, local_rank, max_wait_s
        self._is_kept = is_kept

    def explain_wait(self, index: int) -> str:
        offset, size = int(self.index.offset[index]), int(self.index.size[index])
        is_here = self.arrivals.has(offset, offset + size)
        return super().explain_wait(index) if is_here else NETWORK

    def announce(self, indices: Iterable[int]) -> None:
        """Some images are read next: so all of them can come at once."""
        for index in indices:
            offset, size = int(self.index.offset[index]), int(self.index.size[index])
            begin = max(0, offset - BLOCK)
            if not self.arrivals.has(begin, offset + size):
                self.arrivals.ask(begin, offset + size)

    @property
    def proofs(self) -> tuple[Int64s, Int64s]:
        """The bytes [begin, end) that prove the class of each class tar."""
        return self._headers.proofs

    def list_unproven(self) -> list[str]:
        """The classes whose class tar cannot be looked at yet; raises for a wrong one."""
        return self._headers.prove_classes(self._pread, self.arrivals.has)

    def ask_for_proofs(self) -> None:
        """Does nothing: what proves the classes comes by itself, as everything does."""

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
        pause_s, begin_s, num_looks = FIRST_PAUSE_S, time.monotonic(), 0
        with self._meter.waiting(self._tell_waiting):
            while not self.arrivals.has(begin, end):
                self.arrivals.ask(begin, end)  # again: the fetcher of a bounded cache clears it
                waited_s = time.monotonic() - begin_s
                self._check_wait(begin, end, waited_s)
                if waited_s > num_looks * LOOK_S:
                    num_looks += 1
                    self._check_kept()
                time.sleep(pause_s)
                pause_s = min(MAX_PAUSE_S, 1.5 * pause_s)

    def _check_wait(self, begin: int, end: int, waited_s: float) -> None:
        """Raises when the fetcher is given up, or when a rank would have to wait too long."""
        failure = self.arrivals.failure
        if isinstance(failure, PassingError):
            raise Starved(str(failure))
        if isinstance(failure, UserError):
            raise Refused(str(failure))
        if failure is not None:
            raise failure
        if waited_s > self._max_wait_s:
            raise Starved(
                f"the network has not brought the bytes {begin}-{end - 1} of "
                f"{self.index.tar.name} in {self._max_wait_s:.0f} s, and the other ranks "
                "wait no longer (--timeout-minutes); run the same command again"
            )

    def _check_kept(self) -> None:
        """Raises when the process that keeps the fetcher has ended."""
        if self._is_kept is not None and not self._is_kept():
            raise Starved(
                f"{self.index.tar.name} has not all arrived, and the process that fetched it has "
                "ended or closed it; what has arrived is kept: open it again"
            )

    def _tell_waiting(self, change: int) -> None:
        rank, arrivals = self._local_rank, self.arrivals
        arrivals.note_waiting(rank, int(arrivals.cursors[rank, 1]) + change)
