"""The parts of a grid job's story: activations, transfers, holds and how it ended."""

from __future__ import annotations

from dataclasses import dataclass

from report.grid.eventlog import JobId

# The ends of a job, in the order of the tables.
SUCCESS = "success"
UNCHECKED = "exit 0, output unchecked"
WRONG_OUTPUT = "wrong output"
HELD = "held"
PREEMPTED_COMPUTE = "preempted in compute"
PREEMPTED_TRANSFER = "preempted in transfer"
REMOVED = "removed"
RUNNING = "running"
WAITING = "waiting"
OUTCOMES = (
    SUCCESS,
    UNCHECKED,
    WRONG_OUTPUT,
    HELD,
    PREEMPTED_COMPUTE,
    PREEMPTED_TRANSFER,
    REMOVED,
    RUNNING,
    WAITING,
)
NOT_OVER = (RUNNING, WAITING)

# Where a job was when it ended or was interrupted.
IN_TRANSFER, IN_COMPUTE, IN_QUEUE = "transfer", "compute", "queue"
UNKNOWN_SITE = "unknown"


@dataclass(frozen=True)
class Transfer:
    """One attempt to bring the input into a slot; it succeeded only if the job then executed."""

    start_s: float
    end_s: float
    succeeded: bool
    stalled: bool = False
    site: str = UNKNOWN_SITE

    @property
    def seconds(self) -> float:
        return max(0.0, self.end_s - self.start_s)  # the clock may have been set back


@dataclass(frozen=True)
class Hold:
    """One 012: its code and subcode say why (021 has other codes)."""

    code: int
    subcode: int
    reason: str
    phase: str

    @property
    def cause(self) -> str:
        if self.code < 0:
            return "hold without a code"
        return f"hold code {self.code}.{self.subcode}"


@dataclass(frozen=True)
class Activation:
    """One stay in a slot: from the first sign of its input transfer or execution to its end."""

    start_s: float
    end_s: float
    execute_s: float | None = None  # the time of its 001
    ended_by: str = ""  # terminated, requeued, evicted, held, removed, lost; "" while it runs
    site: str = UNKNOWN_SITE
    slot: str = ""
    gpu: str = ""
    transfers: tuple[Transfer, ...] = ()
    outputs: tuple[tuple[float, float], ...] = ()  # start and end of each output transfer
    last_checkpoint_s: float | None = None  # the end of the last output transfer that finished

    @property
    def phase(self) -> str:
        return IN_TRANSFER if self.execute_s is None else IN_COMPUTE

    @property
    def seconds(self) -> float:
        return max(0.0, self.end_s - self.start_s)  # the clock may have been set back

    @property
    def output_s(self) -> float:
        return sum(max(0.0, end - start) for start, end in self.outputs)

    @property
    def execute_span_s(self) -> float:
        """From 001 to the end without the output transfers (005's TimeExecute knows less)."""
        if self.execute_s is None:
            return 0.0
        return max(0.0, self.end_s - self.execute_s - self.output_s)

    @property
    def lost_span(self) -> tuple[float, float] | None:
        """The executed time that no checkpoint kept, for an activation that did not terminate."""
        if self.execute_s is None or self.ended_by in ("terminated", ""):
            return None
        return (self.last_checkpoint_s or self.execute_s, self.end_s)


@dataclass(frozen=True)
class JobHistory:
    """All that the log says of one job."""

    job: JobId
    activations: tuple[Activation, ...] = ()
    holds: tuple[Hold, ...] = ()
    num_disconnects: int = 0
    outcome: str = WAITING
    detail: str = ""
    exit_code: int | None = None
    end_s: float | None = None  # the time of 005 or 009

    @property
    def phase(self) -> str:
        return self.activations[-1].phase if self.activations else IN_QUEUE
