"""Where the time of a run went: seconds by phase of a rank, all ranks, all attempts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from train.records.record import PHASES

NETWORK = "network_s"  # the part of data_wait in which reads waited for the network


class PhaseClock:
    """Seconds of this rank by phase; unassigned time is 'other', so that they sum to the total."""

    def __init__(self, started_s: float) -> None:
        self.started_s = started_s  # on the monotonic clock: when the process began
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.last_s = dict.fromkeys(PHASES, 0.0)  # of the last time in each
        self.network_s = 0.0  # the part of data_wait in which reads waited for the network
        self.read_network_s: Callable[[], float] = lambda: 0.0  # how long they have, in all

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin_s = time.monotonic()
        try:
            yield
        finally:
            self.last_s[name] = time.monotonic() - begin_s
            self.seconds[name] += self.last_s[name]

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """The phase data_wait, of which the network may have its part."""
        before_s = self.read_network_s()
        try:
            with self.phase("data_wait"):
                yield
        finally:
            self.network_s += min(self.last_s["data_wait"], self.read_network_s() - before_s)

    def end_startup(self) -> None:
        """Books the time so far, except that of other phases, as start-up."""
        self.seconds["startup"] = self.total_s - sum(self.seconds.values())

    @property
    def total_s(self) -> float:
        return time.monotonic() - self.started_s

    def totals(self, communication_s: float) -> dict[str, float]:
        """Seconds by phase; the estimate of exposed communication is taken out of compute."""
        totals = dict(self.seconds)
        exposed_s = min(communication_s, totals["compute"])
        totals["compute"] -= exposed_s
        totals["communication"] += exposed_s
        totals["other"] = max(0.0, self.total_s - sum(totals.values()))
        return totals | {NETWORK: self.network_s}


def summarise_phases(ranks: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Mean and maximum over the ranks for each phase, and the network's mean part of data_wait."""
    columns = {name: [rank[name] for rank in ranks] for name in PHASES}
    phases = {
        name: {"mean_s": sum(column) / len(column), "max_s": max(column)}
        for name, column in columns.items()
    }
    network_s = sum(rank.get(NETWORK, 0.0) for rank in ranks) / len(ranks)
    phases["data_wait"][NETWORK] = network_s
    return phases


def add_phases(attempts: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """The phases of a run: the sums over its attempts."""
    return {
        name: {
            key: sum(attempt.get(name, {}).get(key, 0.0) for attempt in attempts)
            for key in ("mean_s", "max_s", *([NETWORK] if name == "data_wait" else []))
        }
        for name in PHASES
    }


def process_start_s() -> float:
    """When this process began, on the monotonic clock: imports belong to the start-up."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        return time.monotonic() - (boot_s - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic()
