"""The journal beside a partial file: which MiB have arrived, their checksums and sources."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dataset.checksum import parse_given
from dataset.durable import write_all
from dataset.own_names import NEW, doubted_path
from dataset.transfer.own_files import open_own
from dataset.untrusted import check_count, check_text, parse_json

CHUNK = 1 << 20  # the unit of progress: the most that a kill can cost a connection
FORMAT = 1
MAX_SOURCES = 1000  # that a journal names; ours have a dozen
MAX_SUM = 0xFFFFFFFF
MAX_LINE_BYTES = 1 << 16


@dataclass
class Arrivals:
    """What has arrived, as a journal tells it.

    `chunks` are chunk -> (source number, checksums in the order of `kinds`).
    """

    identity: str
    size: int
    kinds: tuple[str, ...]
    boot_id: str
    chunks: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    etags: dict[str, str] = field(default_factory=dict)
    # Whether this process has read the chunks and found them right. If not, the journal only
    # claims that they are in the file, and they are read before use (ChunkStore.settle_claim).
    were_read: bool = field(default=False, compare=False)


class Marks(Protocol):
    """Who is told at once which chunks are there and right."""

    def mark(self, chunk: int) -> None: ...

    def unmark(self, first: int, end: int) -> None: ...


def num_chunks(size: int) -> int:
    return -(-size // CHUNK)


def chunk_length(chunk: int, size: int) -> int:
    return min(CHUNK, size - chunk * CHUNK)


def read_boot_id() -> str:
    """An id that changes with every boot: it distinguishes a crash of the machine from a kill."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class Journal:
    """Appends one line per event, in one write, after the bytes that the line is about.

    A kill -9 cannot change the order of the two writes. A power cut can, or lose one: the boot id
    in the first line shows that, and the chunks are then read and checked again.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    @classmethod
    def create(cls, path: Path, arrivals: Arrivals) -> Journal:
        """A new journal with the content of `arrivals`, renamed into place when complete."""
        new = path.with_name(path.name + NEW)
        fd = open_own(new, os.O_WRONLY | os.O_APPEND)
        os.ftruncate(fd, 0)
        lines: list[Any] = [_head(arrivals)]
        lines += [["source", name] for name in arrivals.sources]
        lines += [["digest", kind, value] for kind, value in arrivals.digests.items()]
        lines += [["etag", place, value] for place, value in arrivals.etags.items()]
        lines += [["ok", n, s, *values] for n, (s, values) in sorted(arrivals.chunks.items())]
        write_all(fd, b"".join(_line(line) for line in lines))
        os.fsync(fd)
        new.replace(path)
        doubted_path(path).unlink(missing_ok=True)  # an older one: its chunks were checked
        return cls(path, fd)

    def add_source(self, name: str) -> None:
        write_all(self._fd, _line(["source", name]))

    def add_digest(self, kind: str, value: str) -> None:
        if self._fd < 0:
            return  # the answer came when the transfer was over
        write_all(self._fd, _line(["digest", kind, value]))

    def add_etag(self, place: str, value: str) -> None:
        write_all(self._fd, _line(["etag", place, value]))

    def add_chunk(self, chunk: int, source: int, checksums: Sequence[int]) -> None:
        """The bytes of the chunk are in the file: written before this call."""
        write_all(self._fd, _line(["ok", chunk, source, *checksums]))

    def drop_chunks(self, first: int, end: int) -> None:
        """Notes that chunks are fetched again, before their bytes are overwritten."""
        write_all(self._fd, _line(["no", first, end]))

    def doubt(self) -> None:
        """After a disk error: makes the next start read all recorded chunks again.

        The kernel reports a page that it could not write only once, to this process. Renaming the
        journal tells the next start, and needs no free space as another line would.
        """
        try:
            self.path.replace(doubted_path(self.path))
        except FileNotFoundError:
            return  # by another thread, a moment ago
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._fd, 0)  # then there is nothing to doubt

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)
        self._fd = -1


def _head(arrivals: Arrivals) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "object": arrivals.identity,
        "size": arrivals.size,
        "chunk": CHUNK,
        "kinds": list(arrivals.kinds),
        "boot_id": arrivals.boot_id,
    }


_encode = json.JSONEncoder(separators=(",", ":")).encode  # one for all lines: three times as fast


def _line(value: Any) -> bytes:
    return _encode(value).encode() + b"\n"


def read_journal(path: Path) -> Arrivals | None:
    """The content of the journal, without torn lines; None when there is no usable one.

    A doubted one comes first and counts as of another boot, so that its chunks are read again.
    """
    chosen = _choose(path)
    lines = chosen.read_bytes().split(b"\n") if chosen is not None else [b""]
    arrivals = _read_head(lines[0])
    if arrivals is None:
        return None
    if chosen != path:
        arrivals.boot_id = ""
    for line in lines[1:-1]:  # what follows the last newline is torn
        try:
            _apply(arrivals, parse_json(line, MAX_LINE_BYTES))
        except (ValueError, TypeError, IndexError, KeyError):
            continue
    return arrivals


def read_journal_head(path: Path) -> Arrivals | None:
    """Of which object the journal is, without what has arrived; None as read_journal."""
    chosen = _choose(path)
    if chosen is None:
        return None
    with open(chosen, "rb") as file:
        return _read_head(file.readline(MAX_LINE_BYTES).rstrip(b"\n"))


def _choose(path: Path) -> Path | None:
    """The journal, or the doubted one; None if there is no such file (a pipe would block)."""
    chosen = doubted_path(path) if doubted_path(path).exists() else path
    return chosen if chosen.is_file() else None


def _read_head(line: bytes) -> Arrivals | None:
    try:
        head = parse_json(line, MAX_LINE_BYTES)
        if head["format"] != FORMAT or head["chunk"] != CHUNK:
            return None
        kinds = tuple(check_text(kind) for kind in head["kinds"])
        size, boot_id = check_count(head["size"]), check_text(head["boot_id"])
        return Arrivals(check_text(head["object"]), size, kinds, boot_id)
    except (ValueError, TypeError, KeyError):
        return None


def _apply(arrivals: Arrivals, event: list[Any]) -> None:
    """Applies one line; raises ValueError or the like if it is not ours or does not fit."""
    if event[0] == "ok":
        chunk = check_count(event[1], num_chunks(arrivals.size) - 1)
        source = check_count(event[2], MAX_SOURCES)
        values = tuple(check_count(value, MAX_SUM) for value in event[3:])
        if len(values) == len(arrivals.kinds):
            arrivals.chunks[chunk] = (source, values)
    elif event[0] == "no":
        _drop(arrivals.chunks, check_count(event[1]), check_count(event[2]))
    elif event[0] == "source" and len(arrivals.sources) < MAX_SOURCES:
        arrivals.sources.append(check_text(event[1]))
    elif event[0] == "digest":
        kind = check_text(event[1])
        arrivals.digests[kind] = parse_given(kind, check_text(event[2]))
    elif event[0] == "etag":
        arrivals.etags[check_text(event[1])] = check_text(event[2])


def _drop(chunks: dict[int, Any], first: int, end: int) -> None:
    """Forgets the chunks [first, end); takes time for those present, however wide the range."""
    known = range(first, end) if end - first <= len(chunks) else list(chunks)
    for chunk in known:
        if first <= chunk < end:
            chunks.pop(chunk, None)
