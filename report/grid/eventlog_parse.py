"""HTCondor's own reader of events, in a process of its own: some texts end it by a signal."""

from __future__ import annotations

import datetime
import faulthandler
import os
import resource
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dataset.errors import UserError
from report.grid.eventlog_split import Piece

MAX_CRASHES = 20  # of the reader in one log; after them only headers are used
MAX_CHARS = 1000  # of a reason or a message

# The fields that the grid report looks into, with their types; others are not kept.
_INTS = ("Type", "ReturnValue", "TerminatedBySignal", "HoldReasonCode", "HoldReasonSubCode")
_BOOLS = ("TerminatedNormally", "TerminatedAndRequeued")
_TEXTS = ("HoldReason", "Reason", "ErrorMsg", "SlotName", "GLIDEIN_ResourceName", "GPUs_DeviceName")
_PROPERTIES = "ExecuteProps"  # an ad in the ad of 001


class JobId(NamedTuple):
    """cluster.proc.subproc, printed as the event log does."""

    cluster: int
    proc: int
    subproc: int = 0

    def __str__(self) -> str:
        return f"{self.cluster}.{self.proc:03d}.{self.subproc:03d}"


@dataclass(frozen=True, slots=True)
class Event:
    """One event; `fields` are the bindings' names, empty where the bindings could not read it."""

    kind: int
    job: JobId
    time_s: float
    fields: Mapping[str, Any] = field(default_factory=dict)


class _Ad(Protocol):
    def get(self, key: str, /) -> Any: ...


class EventReader:
    """Reads events in a child process, and finds the one that ends it by halving."""

    def __init__(self) -> None:
        import_bindings()  # says what is missing before any process is started
        self.num_crashes = 0
        self._pool: ProcessPoolExecutor | None = None
        self._folder = tempfile.TemporaryDirectory()

    def __enter__(self) -> EventReader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        self._folder.cleanup()

    def read(self, pieces: Sequence[Piece]) -> list[Event | None]:
        """The event of each piece of a text log, or None where the bindings refuse it."""
        return self._halve(pieces, _match_headers)

    def read_nested(self, pieces: Sequence[Piece]) -> list[Event | None]:
        """The events of pieces of XML or JSON: as many as the bindings find."""
        return self._halve(pieces, lambda _, answers: answers)

    def _halve(self, pieces: Sequence[Piece], check: _Check) -> list[Event | None]:
        if not pieces:
            return []
        answers = self._ask([piece.text for piece in pieces])
        checked = None if answers is None else check(pieces, answers)
        if checked is not None:
            return checked
        if len(pieces) == 1 or self.num_crashes >= MAX_CRASHES:
            return [None] * len(pieces)
        middle = len(pieces) // 2
        return self._halve(pieces[:middle], check) + self._halve(pieces[middle:], check)

    def _ask(self, texts: list[bytes]) -> list[Event | None] | None:
        """The child's answers, or None when these texts end it."""
        if self.num_crashes >= MAX_CRASHES:
            return None
        if self._pool is None:
            self._pool = ProcessPoolExecutor(max_workers=1, initializer=_be_quiet)
        path = Path(self._folder.name, "events.log")
        path.write_bytes(b"".join(texts).decode("utf-8", "replace").encode())
        try:
            return self._pool.submit(_read_file, str(path), 2 * len(texts)).result()
        except BrokenProcessPool:
            self.num_crashes += 1
            self._pool.shutdown()
            self._pool = None
            return None


_Check = Callable[[Sequence[Piece], list[Event | None]], list[Event | None] | None]


def _match_headers(
    pieces: Sequence[Piece], answers: list[Event | None]
) -> list[Event | None] | None:
    """The answers if there is one for each piece, with the job of its header; else None."""
    if len(answers) != len(pieces):
        return None
    for piece, answer in zip(pieces, answers, strict=True):
        assert piece.header is not None, "a piece of a text log has a header"
        if answer is not None and (answer.kind, answer.job) != _identify(piece):
            return None
    return answers


def _identify(piece: Piece) -> tuple[int, JobId]:
    header = piece.header
    assert header is not None, "a piece of a text log has a header"
    job = JobId(int(header["cluster"]), int(header["proc"]), int(header["subproc"]))
    return int(header["kind"]), job


def header_event(piece: Piece) -> Event | None:
    """The event by its header alone; None where its date is none."""
    header = piece.header
    assert header is not None, "a piece of a text log has a header"
    fraction = (header["fraction"] or b".").ljust(7, b"0")  # Python 3.10 wants all six digits
    words = (header["date"], b"T", header["time"], fraction)
    kind, job = _identify(piece)
    zone = "+00:00" if header["zone"] else ""
    try:
        return Event(kind, job, _to_seconds(b"".join(words).decode() + zone))
    except (ValueError, OverflowError):
        return None


def _to_seconds(iso: str) -> float:
    return datetime.datetime.fromisoformat(iso).timestamp()


def _be_quiet() -> None:
    """A crash of the child is expected: no trace of it on the terminal, no core file."""
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _read_file(path: str, limit: int) -> list[Event | None]:
    """Each event of a file as the bindings read it, or None for one that they refuse."""
    bindings = import_bindings()
    log = bindings.JobEventLog(path)
    answers = log.events(stop_after=0)
    events: list[Event | None] = []
    while len(events) <= limit:  # a reader that goes round in circles ends, too
        try:
            events.append(_to_event(next(answers)))
        except StopIteration:
            break
        except (bindings.HTCondorException, ValueError):  # a text that is no UTF-8
            events.append(None)
    log.close()
    return events


def _to_event(ad: _Ad) -> Event | None:
    """The event with those fields that have their type; None without a kind or a time."""
    # The bindings give local time for every format; their own timestamp drops the zone of UTC logs.
    try:
        time_s = _to_seconds(ad.get("EventTime"))
    except (TypeError, ValueError, OverflowError):
        return None
    kind = _to_int(ad.get("EventTypeNumber"))
    if kind is None:
        return None
    numbers = (_to_int(ad.get(name)) for name in ("Cluster", "Proc", "Subproc"))
    cluster, proc, subproc = (-1 if number is None else number for number in numbers)
    fields = _pick_fields(ad)
    properties = ad.get(_PROPERTIES)
    if kind == 1 and hasattr(properties, "get"):
        fields |= _pick_fields(properties)
    return Event(kind, JobId(cluster, proc, max(0, subproc)), time_s, fields)


def _pick_fields(ad: _Ad) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name in _INTS:
        if (number := _to_int(ad.get(name))) is not None:
            fields[name] = number
    for name in _BOOLS:
        if isinstance(flag := ad.get(name), bool):
            fields[name] = flag
    for name in _TEXTS:
        if isinstance(text := ad.get(name), str):
            fields[name] = text[:MAX_CHARS].encode("utf-8", "replace").decode()
    return fields


def _to_int(value: Any) -> int | None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return int(value) if is_int and abs(value) < 2**31 else None


def import_bindings() -> Any:
    """HTCondor's bindings; the pool that they may be told of is not needed to read a file."""
    os.environ.setdefault("CONDOR_CONFIG", "ONLY_ENV")
    try:
        import htcondor2
    except ImportError:
        raise UserError(
            "reading event logs needs HTCondor's Python bindings; run: pip install htcondor"
        ) from None
    return htcondor2
