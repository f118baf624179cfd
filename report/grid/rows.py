"""One row per grid job, from its history in the event log and the records that came back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from dataset.errors import CommandError
from report.grid.eventlog import JobId
from report.grid.jobs import (
    SUCCESS,
    UNCHECKED,
    WRONG_OUTPUT,
    Activation,
    JobHistory,
    Transfer,
)
from report.record_shape import shape_record, to_number
from report.streams import StreamFigures, read_stream
from train.records.record import (
    STAGES_FILE,
    Record,
    explain_untrained,
    find_runs,
    read_lines,
    read_run,
)

Span = tuple[float, float]
_JOB_ID = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})")


@dataclass(frozen=True)
class GridJob:
    """One job as the tables need it; all times in seconds."""

    job_id: str
    sites: tuple[str, ...]
    outcome: str
    phase: str = ""  # where it was at its end: transfer, compute or queue
    detail: str = ""
    compute_s: float = 0.0  # executing, without output transfers and in-job fetch
    lost_compute_s: float = 0.0  # the part of it that no checkpoint kept
    transfer_last_s: float = 0.0
    transfer_retried_s: float = 0.0  # every input transfer before the last one
    transfer_span_s: float = 0.0  # the study's 'total': first start to last end, waiting included
    stalled_s: float = 0.0  # the stalled ones among the retried
    repeated_s: float = 0.0  # the ones that had succeeded, and came again after an eviction
    num_stalls: int = 0
    fetch_s: float = 0.0  # fetched by the job itself
    refetch_s: float = 0.0  # fetched again after an eviction
    output_s: float = 0.0
    other_s: float = 0.0  # the rest of the slot's time: start-up, waiting for the shadow
    slot_busy_s: float | None = None
    match_to_end_s: float | None = None  # first match to the end, for jobs that came to one
    num_evictions: int = 0
    num_disconnects: int = 0
    holds: tuple[str, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    stream: StreamFigures | None = None  # of a job that trained while its tar arrived
    citation: str = ""  # who published the table that it is a row of

    @property
    def succeeded(self) -> bool:
        return self.outcome in (SUCCESS, UNCHECKED)

    @property
    def site(self) -> str:
        """The site where it ended, by which the sites' tables count it."""
        return self.sites[-1] if self.sites else ""


@dataclass(frozen=True)
class JobRecord:
    """What came back from a job: its run.json and when it fetched."""

    run: Record
    fetches: tuple[Span, ...] = ()


def read_records(paths: list[Path]) -> tuple[dict[JobId, JobRecord], list[str]]:
    """The record of each HTCondor job at or below the paths, and notes on unusable ones.

    Other runs are passed over.
    """
    records: dict[JobId, JobRecord] = {}
    notes = []
    for folder in find_runs(paths):
        try:
            run, _ = shape_record(read_run(folder))
            fetches = tuple(_read_fetches(folder / STAGES_FILE))
        except (CommandError, OSError) as error:
            notes.append(f"left out: {error}")
            continue
        scheduler = run.get("scheduler") or {}
        job = _JOB_ID.fullmatch(str(scheduler.get("job_id")))
        if scheduler.get("kind") == "condor" and job is not None:
            records[JobId(int(job[1]), int(job[2]))] = JobRecord(run, fetches)
    return records, notes


def _read_fetches(path: Path) -> Iterator[Span]:
    for line in read_lines(path):
        start, seconds = to_number(line.get("start")), to_number(line.get("seconds"))
        if line.get("stage") == "fetch" and start is not None and seconds is not None:
            yield start, start + max(0.0, seconds)


def make_row(history: JobHistory, record: JobRecord | None = None) -> GridJob:
    """The row of a job; with its record the outcome is checked and the in-job fetch known."""
    activations = history.activations
    fetches = record.fetches if record else ()
    executed_s = sum(a.execute_span_s for a in activations)
    fetch_s = sum(_overlap(fetch, _execute_span(a)) for a in activations for fetch in fetches)
    transfers = tuple(t for a in activations for t in a.transfers)
    slot_s = sum(a.seconds for a in activations)
    output_s = sum(a.output_s for a in activations)
    row = GridJob(
        job_id=str(history.job),
        sites=_merge_sites(activations),
        outcome=history.outcome,
        phase=history.phase,
        detail=history.detail,
        compute_s=executed_s - fetch_s,
        lost_compute_s=sum(_lost_s(a, fetches) for a in activations),
        fetch_s=fetch_s,
        refetch_s=fetch_s
        - sum(_overlap(f, _execute_span(a)) for a in activations[-1:] for f in fetches),
        output_s=output_s,
        slot_busy_s=slot_s,
        num_evictions=sum(a.ended_by in ("evicted", "lost") for a in activations),
        num_disconnects=history.num_disconnects,
        holds=tuple(hold.cause for hold in history.holds),
        transfers=transfers,
        stream=read_stream(record.run) if record else None,
    )
    row = _with_transfers(row, transfers)
    spent_s = executed_s + output_s + row.transfer_last_s + row.transfer_retried_s
    row = replace(row, other_s=max(0.0, slot_s - spent_s))
    if history.end_s is not None and activations:
        row = replace(row, match_to_end_s=max(0.0, history.end_s - activations[0].start_s))
    return check_outcome(row, record)


def check_outcome(row: GridJob, record: JobRecord | None) -> GridJob:
    """The row with 'exit 0' turned into success or wrong output by the run.json that came back."""
    if row.outcome != UNCHECKED or record is None:
        return row
    if problem := explain_untrained(record.run):
        return replace(row, outcome=WRONG_OUTPUT, detail=problem)
    return replace(row, outcome=SUCCESS)


def _with_transfers(row: GridJob, transfers: tuple[Transfer, ...]) -> GridJob:
    if not transfers:
        return row
    earlier = transfers[:-1]
    return replace(
        row,
        transfer_last_s=transfers[-1].seconds,
        transfer_retried_s=sum(t.seconds for t in earlier),
        transfer_span_s=max(0.0, transfers[-1].end_s - transfers[0].start_s),
        stalled_s=sum(t.seconds for t in earlier if t.stalled),
        repeated_s=sum(t.seconds for t in earlier if t.succeeded),
        num_stalls=sum(t.stalled for t in transfers),
    )


def _merge_sites(activations: tuple[Activation, ...]) -> tuple[str, ...]:
    """The sites in order, one for each stay that got as far as executing."""
    return tuple(a.site for a in activations if a.execute_s is not None)


def _execute_span(activation: Activation) -> Span:
    if activation.execute_s is None:
        return (activation.end_s, activation.end_s)
    return (activation.execute_s, activation.end_s)


def _lost_s(activation: Activation, fetches: tuple[Span, ...]) -> float:
    span = activation.lost_span
    if span is None:
        return 0.0
    elsewhere = (*fetches, *activation.outputs)
    return max(0.0, span[1] - span[0] - sum(_overlap(other, span) for other in elsewhere))


def _overlap(one: Span, other: Span) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
