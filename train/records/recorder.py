"""Keeps run.json up to date during a run: attempts, phases, results; only rank 0 writes."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

from dataset.durable import write_json
from dataset.errors import DataError
from train.ranks.launch import Launch
from train.records.phases import NETWORK, add_phases, summarise_phases
from train.records.record import (
    EPOCHS_FILE,
    RUN_FILE,
    SCHEMA,
    Record,
    append_line,
    read_run,
)

log = logging.getLogger("trainyard")

TOUCH_S = 30.0  # the accuracy of a killed attempt's length


class Recorder:
    """run.json and epochs.jsonl of one folder, over all attempts at the run.

    A full disk does not stop the training: what could not be written goes with the next update.
    """

    def __init__(self, folder: Path, launch: Launch) -> None:
        self.folder = folder
        self._launch = launch
        self._touched_s = 0.0
        self._epochs: list[Record] = []  # not written yet
        self._lock = threading.Lock()  # the thread that hears of another rank's failure writes too
        self.run: Record = {"schema": SCHEMA, "attempts": []}
        if (folder / RUN_FILE).exists():
            self.run = read_run(folder)
            check_attempts(self.run, folder)
        for attempt in self.run["attempts"]:
            attempt["reason"] = attempt["reason"] or "killed"

    def begin(self, started_s: float, queue_s: float | None, fields: Record) -> None:
        """A new attempt; fields are what is known of the run before it trains."""
        if {a["ranks"] for a in self.run["attempts"][-1:]} != {self._launch.world_size}:
            self.run["steady_images_per_s"] = None  # other ranks, another speed
        self.run.update(fields)
        begin = time.time() - (time.monotonic() - started_s)
        self.run["attempts"].append(
            {
                "start": begin,
                "end": begin,
                "seconds": 0.0,
                "ranks": self._launch.world_size,
                "nodes": self._launch.num_nodes,
                "launcher": self._launch.launcher,
                "reason": "",
                "queue_s": queue_s,
                "host": os.uname().nodename,
            }
        )
        self.run.update(status="running", exit_code=None)
        self._write()

    def touch(self, phases: list[dict[str, float]], of_attempt: Record) -> None:
        """Brings the attempt up to date, at most every half minute."""
        if time.monotonic() - self._touched_s > TOUCH_S:
            self.update(phases, {}, of_attempt)

    def update(
        self, phases: list[dict[str, float]], fields: Record, of_attempt: Record | None = None
    ) -> None:
        """Writes the attempt's phases (one mapping a rank), and other fields of both."""
        self.run.update(fields)
        attempt = self.run["attempts"][-1]
        attempt.update(of_attempt or {})
        attempt["phases"] = summarise_phases(phases)
        attempt["seconds"] = sum(p["mean_s"] for p in attempt["phases"].values())
        attempt["end"] = attempt["start"] + attempt["seconds"]
        self.run["wall_clock_s"] = sum(a["seconds"] for a in self.run["attempts"])
        self.run["phases"] = add_phases([a.get("phases", {}) for a in self.run["attempts"]])
        try:
            self._write()
        except OSError as error:
            log.warning("%s not written: %s; training goes on", RUN_FILE, error.strerror)

    def add_epoch(self, record: Record) -> None:
        """Adds a line to epochs.jsonl."""
        self._epochs.append(record)
        try:
            self._write_epochs()
        except OSError as error:
            log.warning("%s not written: %s; training goes on", EPOCHS_FILE, error.strerror)

    def finish(self, status: str, exit_code: int, reason: str) -> None:
        """Ends the attempt; a write that fails now is an error, unless the run failed anyway."""
        try:
            self._write_epochs()
        except OSError as error:
            if status != "failed":
                raise
            log.warning("%s not written: %s", EPOCHS_FILE, error.strerror)
        self.run.update(status=status, exit_code=exit_code)
        if self.run["attempts"]:
            self.run["attempts"][-1]["reason"] = reason
        self._write()

    def _write(self) -> None:
        self._touched_s = time.monotonic()
        with self._lock:
            write_json(self.folder / RUN_FILE, self.run)

    @property
    def epochs_path(self) -> Path:
        return self.folder / EPOCHS_FILE

    def _write_epochs(self) -> None:
        while self._epochs:
            append_line(self.epochs_path, self._epochs[0])
            self._epochs.pop(0)


def is_recorded_as_done(folder: Path) -> bool:
    """Whether the record in a folder says that its run is done."""
    return (folder / RUN_FILE).exists() and read_run(folder).get("status") == "done"


def check_attempts(run: Record, folder: Path) -> None:
    """Raises for a damaged record: adding an attempt would give wrong sums."""
    attempts = run.get("attempts")
    if not isinstance(attempts, list):
        odd = ["attempts"]
    else:
        odd = [f"attempts[{n}]" for n, value in enumerate(attempts) if not _is_attempt(value)]
    if odd:
        raise DataError(
            f"{folder / RUN_FILE} is damaged ({odd[0]} is not what this trainer writes); restore "
            "it, or move it away: the run continues from its checkpoint, with a new record"
        )


def _is_attempt(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    phases = value.get("phases", {})
    numbers = [value.get(name) for name in ("start", "seconds", "ranks")]
    if not isinstance(phases, dict) or not isinstance(value.get("reason"), str):
        return False
    for phase in phases.values():
        if not isinstance(phase, dict):
            return False
        numbers += [phase.get(key, 0.0) for key in ("mean_s", "max_s", NETWORK)]
    return all(type(number) in (int, float) for number in numbers)
