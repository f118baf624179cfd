"""Jobs of the pool: submitted from a folder of their own, watched through their event log."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Run = Callable[..., str]
PATIENCE_S = 600.0  # a limit for what hangs, not for what a busy machine makes slow


@dataclass(frozen=True)
class Job:
    """A submitted cluster of jobs; `folder` is where it was submitted and its output comes back."""

    cluster: int
    folder: Path
    log: Path
    run: Run = field(repr=False)

    def events(self) -> list[Any]:
        """The events so far, as htcondor2.JobEvent, a torn last one left out."""
        return [event for event in read_events(self.log) if event.cluster == self.cluster]

    def wait_for(
        self, name: str, count: int = 1, proc: int = 0, timeout_s: float = PATIENCE_S
    ) -> Any:
        """The count-th event of that name: EXECUTE, JOB_HELD ... (htcondor2.JobEventType)."""
        return self._wait_for(name, count, proc, timeout_s, may_be_held=True)

    def wait(self, proc: int = 0, timeout_s: float = PATIENCE_S, may_be_held: bool = False) -> int:
        """The exit code of a job that ended by itself (minus the signal that killed it).

        A job that goes on hold meanwhile is an error at once, unless something will release it.
        """
        event = self._wait_for("JOB_TERMINATED", 1, proc, timeout_s, may_be_held)
        if event["TerminatedNormally"]:
            return int(event["ReturnValue"])
        return -int(event["TerminatedBySignal"])

    def _wait_for(
        self, name: str, count: int, proc: int, timeout_s: float, may_be_held: bool
    ) -> Any:
        deadline_s = time.monotonic() + timeout_s
        while True:
            events = [event for event in self.events() if event.proc == proc]
            names = [event.type.name for event in events]
            if names.count(name) >= count:
                return [event for event in events if event.type.name == name][count - 1]
            seen = "\n".join(str(event).rstrip() for event in events[-12:])
            if not may_be_held and names.count("JOB_HELD") > names.count("JOB_RELEASED"):
                raise RuntimeError(f"job {self.cluster}.{proc} is held; the log:\n{seen}")
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no {name} number {count} in {timeout_s} s; the log:\n{seen}")
            time.sleep(0.05)

    def attribute(self, name: str, proc: int = 0) -> str:
        """An attribute of the job's ad, in the queue or in the history."""
        for command in ("condor_q", "condor_history -limit 1"):
            answer = self.run(f"{command} {self.cluster}.{proc} -af {name}").strip()
            if answer:
                return answer
        raise LookupError(f"job {self.cluster}.{proc} is neither queued nor in the history")

    def act(self, command: str) -> None:
        """Does `condor_COMMAND` to the whole cluster: hold, release, vacate_job, rm ..."""
        self.run(f"condor_{command} {self.cluster}")


def read_events(log: Path) -> list[Any]:
    """The whole events of an event log."""
    if not log.exists():
        return []
    # Lets the bindings load on a machine that has no HTCondor configuration.
    os.environ.setdefault("CONDOR_CONFIG", "ONLY_ENV")
    import htcondor2

    with htcondor2.JobEventLog(str(log)) as reader:
        return list(reader.events(stop_after=0))


def describe(text: str, log: str, queue: Sequence[str] = ("queue",)) -> str:
    """A submit description with the log and the queue statement that it lacks."""
    lines = [line.strip().lower() for line in text.splitlines()]
    if not any(line.split("=")[0].strip() == "log" for line in lines):
        text = f"log = {log}\n{text}"
    if not any(line.startswith("queue") for line in lines):
        text = f"{text.rstrip()}\n{' '.join(queue)}\n"
    return text
