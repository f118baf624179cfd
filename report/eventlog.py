"""HTCondor event logs as a list of events: several files, rotated, interleaved, torn or odd."""

from __future__ import annotations

import datetime
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dataset.errors import UserError

# The kinds of events that the grid report looks into; all others are only counted.
SUBMIT, EXECUTE, EVICTED, TERMINATED, SHADOW_EXCEPTION = 0, 1, 4, 5, 7
ABORTED, HELD, RELEASED, REMOTE_ERROR = 9, 12, 13, 21
DISCONNECTED, RECONNECTED, RECONNECT_FAILED, FILE_TRANSFER = 22, 23, 24, 40

# Event 040's Type.
INPUT_QUEUED, INPUT_STARTED, INPUT_FINISHED = 1, 2, 3
OUTPUT_QUEUED, OUTPUT_STARTED, OUTPUT_FINISHED = 4, 5, 6

# "000 (794569.000.000) 2024-08-20 10:00:00 " and "… 08/20 10:00:00 " of older versions. It is
# looked for anywhere in a line: what follows a torn event starts where that one was cut.
_HEADER = re.compile(
    r"(?P<kind>\d{3}) \((?P<cluster>\d+)\.(?P<proc>-?\d+)\.(?P<subproc>-?\d+)\) "
    r"(?P<date>\d{4}-\d\d-\d\d|\d\d/\d\d)(?P<sep>[ T])(?P<time>\d\d:\d\d:\d\d)"
)
_SYNC_LINE = re.compile(r"^\.\.\.\r?\n?", re.MULTILINE)


class JobId(NamedTuple):
    """cluster.proc.subproc, printed as the event log does."""

    cluster: int
    proc: int
    subproc: int = 0

    def __str__(self) -> str:
        return f"{self.cluster}.{self.proc:03d}.{self.subproc:03d}"


@dataclass(frozen=True)
class Event:
    """One event; `fields` are the bindings' names, empty where the bindings could not read it."""

    kind: int
    job: JobId
    time_s: float
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EventLog:
    """The events of all files in order, and what could not be used."""

    events: tuple[Event, ...]
    num_torn: int = 0  # cut short by a crash or by reading while it was written
    num_unreadable: int = 0  # whole, but the bindings refused the body: only its header is used
    unknown_kinds: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Piece:
    """The text of one whole event with its header."""

    text: str
    header: re.Match[str]


def read_event_logs(paths: list[Path]) -> EventLog:
    """The events of all files; one that stands in two (DAGMan's log too) counts once."""
    logs = sorted((read_event_log(path) for path in paths), key=_first_time)
    seen: Counter[tuple[Any, ...]] = Counter()
    events: list[Event] = []
    for log in logs:
        here: Counter[tuple[Any, ...]] = Counter()
        for event in log.events:
            key = (event.job, event.kind, int(event.time_s), event.fields.get("Type"))
            here[key] += 1
            if here[key] > seen[key]:
                events.append(event)
        seen |= here
    if len(logs) > 1:  # one file keeps its own order, even where its clock was set back
        events.sort(key=lambda event: int(event.time_s))
    unknown: Counter[int] = Counter()
    for log in logs:
        unknown.update(log.unknown_kinds)
    return EventLog(
        tuple(events),
        sum(log.num_torn for log in logs),
        sum(log.num_unreadable for log in logs),
        dict(sorted(unknown.items())),
    )


def read_event_log(path: Path) -> EventLog:
    """The events of one file in the order of the file; XML and JSON logs are read too."""
    bindings = _import_bindings()
    text = path.read_bytes().decode("utf-8", errors="replace")
    if not text.strip():
        return EventLog(())
    if text.lstrip()[0] in "<{":  # log_xml = true, or an EVENT_LOG written as JSON
        events = [event for event in _ask_bindings(bindings, path) if event is not None]
        num_torn = num_unreadable = 0
    else:
        pieces, num_torn = split_events(text)
        newest = datetime.datetime.fromtimestamp(path.stat().st_mtime)
        events, num_unreadable = _parse(bindings, [_with_year(p, newest) for p in pieces])
    if not events:
        raise UserError(f"no HTCondor event in {path}; give the file that `log = …` names")
    known = {int(kind) for kind in bindings.JobEventType}
    unknown = Counter(event.kind for event in events if event.kind not in known)
    return EventLog(tuple(events), num_torn, num_unreadable, unknown)


def split_events(text: str) -> tuple[list[_Piece], int]:
    """The whole events of a text log, and how many were torn (no end line, or a new one inside)."""
    pieces: list[_Piece] = []
    num_torn = 0
    start = 0
    for sync in _SYNC_LINE.finditer(text):
        body = text[start : sync.start()]
        headers = list(_HEADER.finditer(body))
        if headers:  # what stands before the last header was cut short
            pieces.append(_Piece(body[headers[-1].start() :] + "...\n", headers[-1]))
        num_torn += bool(body[: headers[-1].start()].strip()) if headers else bool(body.strip())
        start = sync.end()
    return pieces, num_torn + bool(text[start:].strip())


def _with_year(piece: _Piece, newest: datetime.datetime) -> str:
    """The event with an ISO date; a date without a year is the last such one before `newest`."""
    header = piece.header
    if "/" not in header["date"]:
        return piece.text
    month, day = header["date"].split("/")
    year = newest.year
    if (int(month), int(day)) > (newest.month, newest.day + 1):
        year -= 1
    start, end = (offset - header.start() for offset in header.span("date"))
    return f"{piece.text[:start]}{year}-{month}-{day}{piece.text[end:]}"


def _parse(bindings: Any, texts: list[str]) -> tuple[list[Event], int]:
    """The events, and how many the bindings refused. They see only whole events in one clean file.

    Left alone they stop without a word at the first line that is no event and lose what follows.
    """
    events: list[Event] = []
    num_unreadable = 0
    with tempfile.TemporaryDirectory() as folder:
        clean = Path(folder, "events.log")
        clean.write_text("".join(texts), encoding="utf-8")
        answers = _ask_bindings(bindings, clean)
        for text in texts:
            answer = next(answers, None)
            num_unreadable += answer is None
            events.append(answer or _header_event(text))
    return events, num_unreadable


def _ask_bindings(bindings: Any, path: Path) -> Iterator[Event | None]:
    """Each event as the bindings read it, or None for one that they refuse."""
    log = bindings.JobEventLog(str(path))
    answers = log.events(stop_after=0)
    while True:
        try:
            yield _to_event(next(answers))
        except StopIteration:
            log.close()
            return
        except bindings.HTCondorException:
            yield None


def _to_event(event: Any) -> Event:
    fields = {name: event[name] for name in event}
    job = JobId(fields.get("Cluster", -1), fields.get("Proc", -1), fields.get("Subproc", 0))
    # The bindings give local time for every format; their own timestamp drops the zone of UTC logs.
    time_s = datetime.datetime.fromisoformat(fields["EventTime"]).timestamp()
    return Event(fields["EventTypeNumber"], job, time_s, fields)


def _header_event(text: str) -> Event:
    header = _HEADER.match(text)
    assert header is not None
    job = JobId(int(header["cluster"]), int(header["proc"]), int(header["subproc"]))
    when = datetime.datetime.fromisoformat(f"{header['date']}T{header['time']}")
    return Event(int(header["kind"]), job, when.timestamp())


def _first_time(log: EventLog) -> float:
    return log.events[0].time_s if log.events else 0.0


def _import_bindings() -> Any:
    os.environ.setdefault("CONDOR_CONFIG", "ONLY_ENV")  # no pool is needed to read a file
    try:
        import htcondor2
    except ImportError:
        raise UserError(
            "reading event logs needs HTCondor's Python bindings; run: pip install htcondor"
        ) from None
    return htcondor2
