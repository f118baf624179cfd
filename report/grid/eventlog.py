"""HTCondor event logs as a list of events: several files, rotated, interleaved, torn or odd."""

from __future__ import annotations

import datetime
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataset.errors import UserError
from report.grid.eventlog_parse import Event, EventReader, JobId, header_event, import_bindings
from report.grid.eventlog_split import HEADER, Piece, split_log
from report.words import count

__all__ = ["Event", "EventLog", "JobId", "read_event_log", "read_event_logs"]

log = logging.getLogger("trainyard")

# The kinds of events that the grid report looks into; all others are only counted.
SUBMIT, EXECUTE, EVICTED, TERMINATED, SHADOW_EXCEPTION = 0, 1, 4, 5, 7
ABORTED, HELD, RELEASED, REMOTE_ERROR = 9, 12, 13, 21
DISCONNECTED, RECONNECTED, RECONNECT_FAILED, FILE_TRANSFER = 22, 23, 24, 40

_WITH_BODY = frozenset(
    {EXECUTE, EVICTED, TERMINATED, SHADOW_EXCEPTION, ABORTED, HELD, REMOTE_ERROR}
    | {RECONNECT_FAILED, FILE_TRANSFER}
)

# Event 040's Type.
INPUT_QUEUED, INPUT_STARTED, INPUT_FINISHED = 1, 2, 3
OUTPUT_QUEUED, OUTPUT_STARTED, OUTPUT_FINISHED = 4, 5, 6

# What is read at a time, so that memory does not grow with the text.
BATCH_EVENTS, BATCH_BYTES = 2000, 4 * 2**20
PROGRESS_S = 5.0


@dataclass(frozen=True)
class EventLog:
    """The events of all files in order, and what could not be used."""

    events: tuple[Event, ...]
    num_torn: int = 0  # cut short by a crash, or without a date that there is
    num_unreadable: int = 0  # whole, but the bindings refused the body: only its header is used
    unknown_kinds: Mapping[int, int] = field(default_factory=dict)

    def describe_losses(self) -> list[str]:
        """What of the logs could not be used, as sentences."""
        remarks = []
        if self.num_torn:
            torn = count(self.num_torn, "event was", "events were")
            remarks.append(f"{torn} cut short or had no valid date, and left out.")
        if self.num_unreadable:
            events = count(self.num_unreadable, "event")
            remarks.append(
                f"HTCondor's reader refused the body of {events}: only the header is used."
            )
        for kind, number in self.unknown_kinds.items():
            events = count(number, "event was", "events were")
            remarks.append(f"{events} of the unknown kind {kind:03d}, and left out.")
        return remarks


def read_event_logs(paths: list[Path]) -> EventLog:
    """The events of all files; one that stands in two (DAGMan's log too) counts once."""
    logs = sorted((read_event_log(path) for path in paths), key=_first_time)
    if len(logs) == 1:  # one file keeps its own order, even where its clock was set back
        return logs[0]
    seen: Counter[tuple[Any, ...]] = Counter()
    events: list[Event] = []
    for one in logs:
        here: Counter[tuple[Any, ...]] = Counter()
        for event in one.events:
            key = (event.job, event.kind, int(event.time_s), event.fields.get("Type"))
            here[key] += 1
            if here[key] > seen[key]:
                events.append(event)
        seen |= here
    events.sort(key=lambda event: int(event.time_s))
    unknown: Counter[int] = Counter()
    for one in logs:
        unknown.update(one.unknown_kinds)
    return EventLog(
        tuple(events),
        sum(one.num_torn for one in logs),
        sum(one.num_unreadable for one in logs),
        dict(sorted(unknown.items())),
    )


def read_event_log(path: Path) -> EventLog:
    """The events of one file in the order of the file; XML and JSON logs are read too."""
    if not path.is_file():
        raise UserError(f"no file {path}; give the file that `log = …` names")
    known = {int(kind) for kind in import_bindings().JobEventType}
    state = path.stat()
    if state.st_size == 0:
        return EventLog(())
    newest = datetime.datetime.fromtimestamp(state.st_mtime)
    events: list[Event] = []
    tally: Counter[str] = Counter()
    share = _Sharer()
    with open(path, "rb") as file, EventReader() as reader:
        say = _make_progress(path, state.st_size)
        for batch in _batches(split_log(file)):
            whole = [_with_year(piece, newest) for piece in batch if piece is not None]
            tally["torn"] += len(batch) - len(whole)
            events += map(share.slim, _read_batch(reader, whole, tally))
            say(file.tell())
    if not events and tally.total():
        raise UserError(f"no HTCondor event in {path}; give the file that `log = …` names")
    unknown = Counter(event.kind for event in events if event.kind not in known)
    return EventLog(tuple(events), tally["torn"], tally["refused"], unknown)


def _batches(pieces: Iterator[Piece | None]) -> Iterator[list[Piece | None]]:
    """The pieces in lists of bounded size."""
    batch: list[Piece | None] = []
    num_bytes = 0
    for piece in pieces:
        batch.append(piece)
        num_bytes += len(piece.text) if piece is not None else 0
        if len(batch) >= BATCH_EVENTS or num_bytes >= BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _read_batch(reader: EventReader, pieces: list[Piece], tally: Counter[str]) -> Iterator[Event]:
    """The events of some pieces; those that the bindings refuse by their headers alone."""
    if pieces and pieces[0].header is None:
        found = reader.read_nested(pieces)
        tally["refused"] += found.count(None)
        yield from (event for event in found if event is not None)
        return
    asked = [_has_body(piece) and piece.is_whole for piece in pieces]
    answers = iter(reader.read([piece for piece, ask in zip(pieces, asked, strict=True) if ask]))
    for piece, ask in zip(pieces, asked, strict=True):
        answer = next(answers) if ask else None
        event = answer or header_event(piece)
        if event is None:
            tally["torn"] += 1
            continue
        tally["refused"] += answer is None and _has_body(piece)
        yield event


def _has_body(piece: Piece) -> bool:
    """Whether more than the header of an event is used; most lines of a log are not."""
    return piece.header is not None and int(piece.header["kind"]) in _WITH_BODY


def _with_year(piece: Piece, newest: datetime.datetime) -> Piece:
    """The event with an ISO date; a date without a year is the last such one before `newest`."""
    header = piece.header
    if header is None or b"/" not in header["date"]:
        return piece
    month, day = (int(part) for part in header["date"].split(b"/"))
    year = newest.year
    if (month, day) > (newest.month, newest.day + 1):
        year -= 1
    if (month, day) == (2, 29):
        year -= year % 4
    start, end = header.span("date")
    text = piece.text[:start] + f"{year}-{month:02d}-{day:02d}".encode() + piece.text[end:]
    return Piece(text, HEADER.match(text), piece.is_whole)


class _Sharer:
    """Lets equal ids and fields of events be one object: a log has millions of a few kinds."""

    def __init__(self) -> None:
        self._jobs: dict[JobId, JobId] = {}
        self._fields: dict[tuple[tuple[str, Any], ...], Mapping[str, Any]] = {}

    def slim(self, event: Event) -> Event:
        job = self._jobs.setdefault(event.job, event.job)
        fields = self._fields.setdefault(tuple(event.fields.items()), event.fields)
        return Event(event.kind, job, event.time_s, fields)


def _make_progress(path: Path, size: int) -> Callable[[int], None]:
    """Says how far a long reading is: a line every few seconds, a bar on a terminal."""
    if sys.stderr.isatty():
        try:
            from tqdm import tqdm
        except ImportError:
            pass
        else:
            bar = tqdm(total=size, unit="B", unit_scale=True, desc=path.name, delay=1.0)
            return lambda offset: _move_bar(bar, offset, size)
    next_s = time.monotonic() + PROGRESS_S

    def say(offset: int) -> None:
        nonlocal next_s
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + PROGRESS_S
            log.info("%s: %.0f of %.0f MB read", path.name, offset / 1e6, size / 1e6)

    return say


def _move_bar(bar: Any, offset: int, size: int) -> None:
    bar.update(offset - bar.n)
    if offset >= size:
        bar.close()


def _first_time(one: EventLog) -> float:
    return one.events[0].time_s if one.events else 0.0
