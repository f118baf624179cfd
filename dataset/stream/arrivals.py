"""Which MiB of an object are here: a small file that its fetcher writes and all readers map.

It lies in a temporary folder of the node. Its words are aligned and written by one process each, so
nobody needs a lock: a reader sees the old value or the new one. A chunk is marked when its bytes
are in the partial file, journalled and verified; whoever reads looks before and after. Readers mark
in turn what they wait for (all of them write the same value).
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dataset.durable import writing_whole
from dataset.errors import CommandError, DataError, PassingError, UserError
from dataset.transfer.journal import CHUNK, num_chunks
from dataset.transfer.waste import Waste

MAX_RANKS = 256  # of one node
TEXT_BYTES = 4096
_MAGIC = 0x5452_4149_4E02  # the last byte is the version
_CAUSES = tuple(Waste.__dataclass_fields__)
_COUNTS = ("fetched", "resumed", "refetched", "replaced")
_HEAD = ("magic", "size", "beat_ns", "pid", "state", "code", *_COUNTS, *_CAUSES)
_WORD = {name: number for number, name in enumerate(_HEAD)}
_CURSORS = len(_HEAD) * 8
_TEXT = _CURSORS + MAX_RANKS * 2 * 8
_CHUNKS = _TEXT + TEXT_BYTES
HEAD_BYTES = _CHUNKS  # before what a map has for each part of the object
_KINDS = {kind.exit_code: kind for kind in (UserError, DataError, PassingError)}


class State(IntEnum):
    """How far an object is."""

    COMING = 0
    WHOLE = 1  # verified, and under its final name
    FAILED = 2


@dataclass(frozen=True)
class Tally:
    """What a transfer has cost so far, in bytes."""

    fetched: int = 0
    resumed: int = 0
    refetched: int = 0  # had been freed to make room
    replaced: int = 0  # were changed or removed on the disk
    twice: Mapping[str, int] | None = None  # by cause


class ArrivalMap:
    """The map of one object, opened for reading and writing by the processes of one node."""

    here: npt.NDArray[np.uint8]  # 1: the part is here
    asked: npt.NDArray[np.uint8]  # 1: a reader waits for it, or did

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open()

    @classmethod
    def create(cls, path: Path, size: int) -> ArrivalMap:
        """A new map, in which nothing is here."""
        cls._write(path, size, bytes(2 * num_chunks(size)))
        return cls(path)

    @staticmethod
    def _write(path: Path, size: int, parts: bytes) -> None:
        head = np.zeros(_CHUNKS // 8, np.int64)
        head[_WORD["magic"]], head[_WORD["size"]] = _MAGIC, size
        with writing_whole(path, is_synced=False) as file:
            file.write(head.tobytes())
            file.write(parts)

    def _open(self) -> None:
        with open(self.path, "r+b") as file:
            length = os.fstat(file.fileno()).st_size
            if length < _CHUNKS:
                raise DataError(f"{self.path} is not a map of arrivals; start the run again")
            self._memory = mmap.mmap(file.fileno(), length)
        self._head = np.frombuffer(self._memory, np.int64, len(_HEAD))
        rows = np.frombuffer(self._memory, np.int64, MAX_RANKS * 2, _CURSORS)
        self.cursors = rows.reshape(MAX_RANKS, 2)  # of each local rank: its step, readers waiting
        if self._head[0] != _MAGIC:
            raise DataError(f"{self.path} is not a map of arrivals; start the run again")
        self._map_parts()

    def _map_parts(self) -> None:
        """Finds what the map has for each part of the object, here a chunk."""
        chunks = np.frombuffer(self._memory, np.uint8, offset=_CHUNKS)
        if len(chunks) != 2 * num_chunks(self.size):
            raise DataError(f"{self.path} is not a map of arrivals; start the run again")
        self.here, self.asked = chunks[: len(chunks) // 2], chunks[len(chunks) // 2 :]

    def __getstate__(self) -> Path:
        return self.path

    def __setstate__(self, path: Path) -> None:
        self.path = path
        self._open()

    # What readers ask

    @property
    def size(self) -> int:
        return int(self._head[_WORD["size"]])

    @property
    def state(self) -> State:
        return State(int(self._head[_WORD["state"]]))

    def has(self, begin: int, end: int) -> bool:
        """Whether all chunks of the bytes [begin, end) are here: two tenths of a microsecond."""
        first, last = begin // CHUNK, (end - 1) // CHUNK
        memory = self._memory
        return memory.find(b"\0", _CHUNKS + first, _CHUNKS + last + 1) < 0

    @property
    def failure(self) -> CommandError | None:
        """Why no more will come, once the fetcher is given up."""
        if self.state is not State.FAILED:
            return None
        text = self._memory[_TEXT:_CHUNKS].rstrip(b"\0").decode(errors="replace")
        return _KINDS.get(int(self._head[_WORD["code"]]), PassingError)(text)

    @property
    def silent_s(self) -> float:
        """Since when the fetcher has not been heard of."""
        return (time.monotonic_ns() - int(self._head[_WORD["beat_ns"]])) / 1e9

    @property
    def pid(self) -> int:
        return int(self._head[_WORD["pid"]])

    @property
    def tally(self) -> Tally:
        """What the transfer has cost so far, in all starts of the fetcher."""
        twice = {cause: int(self._head[_WORD[cause]]) for cause in _CAUSES}
        counts = {name: int(self._head[_WORD[name]]) for name in _COUNTS}
        return Tally(**counts, twice=twice)

    @property
    def progress(self) -> int:
        """How far it is, in MiB."""
        return int(self.here.sum())

    @property
    def num_waiting(self) -> int:
        """How many readers of the node wait for a chunk now."""
        return int(self.cursors[:, 1].sum())

    # What the fetcher and its keeper write

    def beat(self) -> None:
        """The fetcher lives."""
        self._head[_WORD["pid"]] = os.getpid()
        self._head[_WORD["beat_ns"]] = time.monotonic_ns()

    def mark(self, chunk: int) -> None:
        """The chunk is here and right."""
        self.here[chunk] = 1

    def unmark(self, first: int, end: int) -> None:
        """The chunks turned out wrong."""
        self.here[first:end] = 0

    def mark_all(self) -> None:
        """The object is whole, verified, and has its final name."""
        self.here[:] = 1
        self._head[_WORD["state"]] = State.WHOLE

    def count(self, tally: Tally) -> None:
        """What the transfer has cost so far."""
        for name in _COUNTS:
            self._head[_WORD[name]] = getattr(tally, name)
        for cause, num_bytes in (tally.twice or {}).items():
            self._head[_WORD[cause]] = num_bytes

    def fail(self, code: int, text: str) -> None:
        """No more will come."""
        self._memory[_TEXT:_CHUNKS] = text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
        self._head[_WORD["code"]] = code
        self._head[_WORD["state"]] = State.FAILED

    # What a rank writes

    def ask(self, begin: int, end: int) -> None:
        """Some reader needs the bytes [begin, end) next."""
        self.asked[begin // CHUNK : (end - 1) // CHUNK + 1] = 1

    def note_step(self, local_rank: int, step: int) -> None:
        """This rank has come to a step."""
        self.cursors[local_rank, 0] = step

    def note_waiting(self, local_rank: int, num_readers: int) -> None:
        """So many readers of this rank wait."""
        self.cursors[local_rank, 1] = num_readers
