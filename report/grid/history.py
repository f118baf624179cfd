"""Reads the events of each job into its history: one activation after the other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from report.grid import eventlog as log
from report.grid.eventlog import Event, JobId
from report.grid.jobs import (
    HELD,
    IN_QUEUE,
    IN_TRANSFER,
    PREEMPTED_COMPUTE,
    PREEMPTED_TRANSFER,
    REMOVED,
    RUNNING,
    UNCHECKED,
    UNKNOWN_SITE,
    WAITING,
    WRONG_OUTPUT,
    Activation,
    Hold,
    JobHistory,
    Transfer,
)


@dataclass
class _Builder:
    """The story of one job so far, told event by event."""

    history: JobHistory
    now: Activation | None = None
    transfer_start_s: float | None = None
    transfer_end_s: float | None = None
    stalled: bool = False
    output_start_s: float | None = None
    earlier_checkpoint_s: float | None = None  # the one before the last
    last_time_s: float = 0.0
    # Lists, since a job may have a million of each and a tuple is copied to add one.
    done: list[Activation] = field(default_factory=list)
    holds: list[Hold] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)  # of the open activation
    outputs: list[tuple[float, float]] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Takes the next event of the job."""
        self.last_time_s = event.time_s
        kind, fields = event.kind, event.fields
        if kind == log.FILE_TRANSFER:
            self._transfer(int(fields.get("Type", 0)), event.time_s)
        elif kind == log.EXECUTE:
            self._execute(event)
        elif kind == log.REMOTE_ERROR:
            self._error(str(fields.get("ErrorMsg", "")))
        elif kind == log.DISCONNECTED:
            self._change(num_disconnects=self.history.num_disconnects + 1)
        elif kind in _ENDINGS:
            _ENDINGS[kind](self, event)
        elif kind == log.RELEASED:
            self._change(outcome=WAITING, detail="")

    def finish(self) -> JobHistory:
        """The history; an activation that is still open ends at the job's last event."""
        if self.now is not None:
            self._change(outcome=RUNNING, detail=f"in {self.now.phase}")
            self._close("", self.last_time_s)
        return replace(self.history, activations=tuple(self.done), holds=tuple(self.holds))

    def terminated(self, event: Event) -> None:
        """005: the exit code decides; whether the output is right only run.json can tell."""
        self._close("terminated", event.time_s)
        outcome, detail, code = _judge_exit(event)
        self._change(outcome=outcome, detail=detail, exit_code=code, end_s=event.time_s)

    def evicted(self, event: Event) -> None:
        """004: evicted from the slot, or (requeued) an exit that is tried again."""
        requeued = bool(event.fields.get("TerminatedAndRequeued"))
        self._leave("requeued" if requeued else "evicted", event)
        if requeued:
            self._change(outcome=WAITING, detail=f"exit {event.fields.get('ReturnValue')}, retried")

    def lost(self, event: Event) -> None:
        """007 or 024: the shadow or the connection is gone."""
        self._leave("lost", event)

    def held(self, event: Event) -> None:
        """012, with or without a 004 before it (code 47 has none)."""
        self._close("held", event.time_s)
        fields = event.fields
        phase = self.done[-1].phase if self.done else IN_QUEUE
        code, subcode = fields.get("HoldReasonCode", -1), fields.get("HoldReasonSubCode", 0)
        hold = Hold(int(code), int(subcode), str(fields.get("HoldReason", "")), phase)
        self.holds.append(hold)
        self._change(outcome=HELD, detail=f"{hold.cause} in {phase}")

    def removed(self, event: Event) -> None:
        """009: removed by a person or by a policy."""
        self._close("removed", event.time_s)
        reason = str(event.fields.get("Reason", ""))
        self._change(outcome=REMOVED, detail=reason, end_s=event.time_s)

    def _transfer(self, kind: int, time_s: float) -> None:
        if kind in (log.INPUT_QUEUED, log.INPUT_STARTED):
            if self.transfer_start_s is not None:  # the one before ended without a word
                self._close("lost", time_s)
            self._open(time_s)
            if kind == log.INPUT_STARTED:
                self.transfer_start_s, self.transfer_end_s = time_s, None
        elif kind == log.INPUT_FINISHED:
            if self.transfer_start_s is None:  # its start is in a log that was not given
                return
            self.transfer_end_s = time_s
            if self.now is not None and self.now.execute_s is not None:  # 001 was first
                self._end_transfer(time_s, succeeded=True)
        elif kind == log.OUTPUT_STARTED and self.now is not None:
            self.output_start_s = time_s
        elif kind == log.OUTPUT_FINISHED and self.now is not None:
            start_s = time_s if self.output_start_s is None else self.output_start_s
            self.output_start_s = None
            self.earlier_checkpoint_s = self.now.last_checkpoint_s
            self.outputs.append((start_s, time_s))
            self.now = replace(self.now, last_checkpoint_s=time_s)

    def _error(self, message: str) -> None:
        """021: the watchdog of the input, or an output that did not arrive although 040 ended."""
        self.stalled |= "transfer stalled" in message
        if "failed to send file" in message and self.now is not None:
            self.now = replace(self.now, last_checkpoint_s=self.earlier_checkpoint_s)

    def _execute(self, event: Event) -> None:
        self._open(event.time_s)
        assert self.now is not None
        slot = str(event.fields.get("SlotName", ""))
        site = str(event.fields.get("GLIDEIN_ResourceName") or slot.rpartition("@")[2])
        self.now = replace(
            self.now,
            execute_s=event.time_s,
            slot=slot,
            site=site or UNKNOWN_SITE,
            gpu=str(event.fields.get("GPUs_DeviceName") or ""),
        )
        if self.transfer_start_s is not None and self.transfer_end_s is not None:
            self._end_transfer(self.transfer_end_s, succeeded=True)

    def _open(self, time_s: float) -> None:
        """Starts an activation; one that is still open and executing ended without a word."""
        if self.now is not None and self.now.execute_s is not None:
            self._close("lost", time_s)
        if self.now is None:
            self.now = Activation(time_s, time_s)
            self.stalled, self.earlier_checkpoint_s = False, None

    def _leave(self, ended_by: str, event: Event) -> None:
        if self.now is None:
            return
        phase = self.now.phase
        self._close(ended_by, event.time_s)
        outcome = PREEMPTED_TRANSFER if phase == IN_TRANSFER else PREEMPTED_COMPUTE
        self._change(outcome=outcome, detail=str(event.fields.get("Reason", "")))

    def _close(self, ended_by: str, time_s: float) -> None:
        if self.now is None:
            return
        executed = self.now.execute_s is not None
        if self.transfer_start_s is not None:
            # Without a 040 Finished a job that started had its input by then.
            end_s = self.transfer_end_s or self.now.execute_s or time_s
            self._end_transfer(end_s, succeeded=executed)
        if self.output_start_s is not None:  # cut off: time spent, but nothing was kept
            self.outputs.append((self.output_start_s, time_s))
        self.now = replace(self.now, end_s=time_s, ended_by=ended_by)
        transfers, outputs = tuple(self.transfers), tuple(self.outputs)
        self.done.append(replace(self.now, transfers=transfers, outputs=outputs))
        self.now, self.output_start_s = None, None
        self.transfers, self.outputs = [], []

    def _end_transfer(self, end_s: float, *, succeeded: bool) -> None:
        assert self.now is not None and self.transfer_start_s is not None
        stalled = self.stalled and not succeeded
        site = self.now.site
        self.transfers.append(Transfer(self.transfer_start_s, end_s, succeeded, stalled, site))
        self.transfer_start_s = self.transfer_end_s = None

    def _change(self, **changes: object) -> None:
        self.history = replace(self.history, **changes)  # type: ignore[arg-type]


_ENDINGS = {
    log.TERMINATED: _Builder.terminated,
    log.EVICTED: _Builder.evicted,
    log.SHADOW_EXCEPTION: _Builder.lost,
    log.RECONNECT_FAILED: _Builder.lost,
    log.HELD: _Builder.held,
    log.ABORTED: _Builder.removed,
}


def _judge_exit(event: Event) -> tuple[str, str, int | None]:
    """(outcome, detail, exit code) of a 005."""
    fields = event.fields
    if not fields.get("TerminatedNormally"):
        return WRONG_OUTPUT, f"killed by signal {fields.get('TerminatedBySignal', '?')}", None
    code = int(fields.get("ReturnValue", -1))
    if code != 0:
        return WRONG_OUTPUT, f"exit {code}", code
    return UNCHECKED, "", 0


def read_histories(events: Iterable[Event]) -> list[JobHistory]:
    """The history of each job, sorted by job id; events of no job (a cluster's) are left out."""
    builders: dict[JobId, _Builder] = {}
    for event in events:
        if event.job.cluster < 0 or event.job.proc < 0:
            continue
        builder = builders.get(event.job)
        if builder is None:
            builder = builders[event.job] = _Builder(JobHistory(event.job))
        builder.add(event)
    return [builders[job].finish() for job in sorted(builders)]
