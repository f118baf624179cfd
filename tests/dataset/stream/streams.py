"""Streams of small objects from small servers: their tasks, their maps, and what was sent."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dataset.own_names import part_path
from dataset.stream.arrivals import ArrivalMap, State
from dataset.stream.fetcher import fetch_stream
from dataset.stream.spec import Needs, StreamedObject, StreamSpec, write_needs
from dataset.transfer.journal import CHUNK, chunk_length, num_chunks
from tests.dataset.object_fetch import make_index
from tests.dataset.small_server import Handler, running

CONTENT = os.urandom(23 * CHUNK + 77)
NUM_CHUNKS = num_chunks(len(CONTENT))
PIECE = 64 << 10
Misbehave = Callable[[Any], bool]


class Counting(Handler):
    """Serves one object in small pieces, counts them, and may be slow."""

    sent: list[int]
    piece_s = 0.0

    def serve(self) -> None:
        found = re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, end = (int(found[1]), int(found[2]) + 1) if found else (0, len(self.content))
        self.send_response(206 if found else 200)
        if found:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(self.content)}")
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        try:
            for position in range(start, end, PIECE):
                piece = self.content[position : min(position + PIECE, end)]
                self.sent.append(len(piece))
                self.wfile.write(piece)
                if self.piece_s:
                    time.sleep(self.piece_s)
        except OSError:  # the other side was killed
            self.close_connection = True


@contextmanager
def serving_counted(
    content: bytes = CONTENT,
    misbehave: Misbehave = lambda handler: False,
    piece_s: float = 0.0,
    name: str = "object.bin",
) -> Iterator[tuple[str, list[dict[str, str]], list[int]]]:
    """(address, the requests so far, the bytes of each piece sent) of an object on loopback."""
    seen: list[dict[str, str]] = []
    sent: list[int] = []
    own: dict[str, Any] = {"content": content, "misbehave": staticmethod(misbehave)}
    with running(Counting, seen=seen, sent=sent, piece_s=piece_s, **own) as url:
        yield f"{url}/{name}", seen, sent


def shuffled_needs(seed: int = 0, num: int = NUM_CHUNKS) -> Needs:
    """Each chunk at a step of its own, far from those of its neighbours."""
    return (np.random.default_rng(seed).permutation(num) * 10).astype(np.int32)


@dataclass
class Stage:
    """The folders of one stream: its data, and what passes between trainer and fetcher."""

    folder: Path
    maps: list[ArrivalMap] = field(default_factory=list)

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def spec_path(self) -> Path:
        return self.folder / "spec.json"

    @property
    def path(self) -> Path:
        return self.data / "object.bin"

    def add(
        self,
        url: str,
        needs: Needs | None,
        content: bytes = CONTENT,
        index: Path | None = None,
        has_index: bool = True,
    ) -> StreamedObject:
        """An object of the stream, with a new map."""
        name = url.rpartition("/")[2]
        self.folder.mkdir(parents=True, exist_ok=True)
        if index is None and has_index:
            (self.folder / name).mkdir(exist_ok=True)
            index = make_index(self.folder / name, content, "crc32")
        place = self.folder / f"{name}.{len(self.maps)}.map"
        self.maps.append(ArrivalMap.create(place, len(content)))
        if needs is not None:
            write_needs(self.folder / f"{name}.needs", needs)
        return StreamedObject(
            url,
            str(self.data / name),
            str(place),
            str(index) if index else "",
            str(self.folder / f"{name}.needs") if needs is not None else "",
        )

    def tell(self, train: StreamedObject, **fields: Any) -> StreamSpec:
        """The task, written down."""
        quick = {"stall_s": 60.0, "give_up_s": 60.0, "missing_s": 0.5, "connections": 4}
        spec = StreamSpec(str(self.data), train, **{**quick, **fields})
        spec.write(self.spec_path)
        return spec

    def make(self, url: str, needs: Needs | None = None, **fields: Any) -> StreamSpec:
        """The task of one object of CONTENT."""
        return self.tell(self.add(url, shuffled_needs() if needs is None else needs), **fields)

    def run(self, spec: StreamSpec) -> None:
        """The whole stream, in this process."""
        fetch_stream(spec, self.maps)

    def find_wrong_marks(self, content: bytes = CONTENT) -> list[int]:
        """The chunks that the map says are here, but are not."""
        marked = np.flatnonzero(self.maps[0].here.copy()).tolist()
        for path in (part_path(self.path), self.path):  # it may get its final name meanwhile
            with suppress(FileNotFoundError), open(path, "rb") as file:
                return [n for n in marked if not self._is_right(file.fileno(), n, content)]
        return marked

    def _is_right(self, fd: int, chunk: int, content: bytes) -> bool:
        begin, length = chunk * CHUNK, chunk_length(chunk, len(content))
        data = os.pread(fd, length, begin)
        return data == content[begin : begin + length] or not self.maps[0].here[chunk]


def find_chunk(handler: Handler) -> int | None:
    """The chunk from which on a request asks for bytes; None if it is for the size."""
    begin, _, end = handler.headers.get("Range", "bytes=0-0")[6:].partition("-")
    return int(begin) // CHUNK if begin != end else None


def first_chunks(seen: list[dict[str, str]]) -> list[int]:
    """The first chunk of each request for bytes; a request for the size is for one byte."""
    ranges = [re.match(r"bytes=(\d+)-(\d+)", request.get("range", "")) for request in seen]
    return [int(r[1]) // CHUNK for r in ranges if r and r[1] != r[2]]


def wait_until(is_so: Callable[[], bool], limit_s: float = 120.0) -> None:
    """Waits for an event; the limit only keeps a broken test from hanging."""
    end_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.005)


def is_alive(pid: int) -> bool:
    """Whether a process works; one that has ended may wait for its parent to take note of it."""
    try:
        return (
            pid > 0 and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_over(arrivals: ArrivalMap) -> bool:
    return arrivals.state is not State.COMING


class Gate:
    """Holds requests until it is opened."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.num_held = 0

    def hold(self) -> None:
        self.num_held += 1
        self.is_open.wait(120)
