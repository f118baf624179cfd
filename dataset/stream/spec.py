"""What the trainer tells the fetcher of a node: a small JSON file, and the order of need beside it.

The order of need is one number a chunk: the step that first uses it. So this room knows no seeds.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dataset.durable import write_json, writing_whole
from dataset.errors import DataError
from dataset.transfer import journal

NEVER = np.iinfo(np.int32).max  # no step of this epoch or the next uses the chunk: it comes last
Needs = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StreamedObject:
    """One object of a stream: from where, to where, and by which need."""

    url: str
    path: str  # where the whole file will be
    arrivals: str  # its map
    index: str = ""  # with the sums of its 1 MiB blocks
    needs: str = ""  # a file of one number a chunk; empty: from front to back
    is_asked: bool = False  # without needs: what readers wait for comes first


@dataclass(frozen=True)
class CacheSpec:
    """A cache for the training tar that is smaller than it."""

    folder: str  # of the units' files
    limit: int  # bytes, of all files in it
    keep_bytes: int  # of units that stay for good
    plans: str  # the folder of the plan of each epoch
    num_ranks: int  # that read from it


@dataclass(frozen=True)
class StreamSpec:
    """The task of one fetcher."""

    data_dir: str
    train: StreamedObject
    val: StreamedObject | None = None
    val_first: bool = False  # a run that goes on validates before its first step
    first_steps: int = 0  # val comes once what these steps need is here
    federation: str | None = None
    token: str | None = None
    connections: int = 16
    give_up_s: float = 6 * 3600.0
    stall_s: float = 20.0
    missing_s: float = 120.0
    cache: CacheSpec | None = None  # None: all of the tar is kept

    def write(self, path: Path) -> None:
        write_json(path, asdict(self), is_synced=False)


def read_spec(path: Path) -> StreamSpec:
    """The task in a file that the trainer wrote."""
    values: dict[str, Any] = json.loads(path.read_text())
    values["train"] = StreamedObject(**values["train"])
    if values["val"] is not None:
        values["val"] = StreamedObject(**values["val"])
    if values["cache"] is not None:
        values["cache"] = CacheSpec(**values["cache"])
    return StreamSpec(**values)


def write_needs(path: Path, needs: Needs) -> None:
    """The step that first uses each chunk."""
    with writing_whole(path, is_synced=False) as file:
        file.write(needs.astype("<i4").tobytes())


def read_needs(path: Path, num_chunks: int) -> Needs:
    """The step that first uses each chunk."""
    needs = np.frombuffer(path.read_bytes(), "<i4")
    if len(needs) != num_chunks:
        raise DataError(f"{path} is for {len(needs)} chunks, the object has {num_chunks}")
    return needs.astype(np.int32)


def spread_needs(begin: Int64s, end: Int64s, steps: Int64s, size: int) -> Needs:
    """The step that first uses each chunk, from those that use the bytes [begin, end)."""
    needs = np.full(journal.num_chunks(size), NEVER, np.int32)
    first, last = begin // journal.CHUNK, (end - 1) // journal.CHUNK
    lengths = last - first + 1
    ahead = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    chunks = np.repeat(first, lengths) + ahead
    np.minimum.at(needs, chunks, np.repeat(steps.astype(np.int32), lengths))
    return needs
