"""Measured commands, and the rows of ratios of benchmarks/fetch.py in docs/fetch.md."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.bench import is_tie, round_ratios


@dataclass(frozen=True)
class ClientRun:
    """One transfer by one client."""

    seconds: float
    cpu_s: float
    peak_mb: float


@dataclass(frozen=True)
class Row:
    """One line of the table: a client against a peer in the same rounds."""

    client: str  # and what it was asked to do
    peer: str
    peer_s: float
    seconds: float
    ratio_of: str  # speed, or time
    ratio: float
    is_tie: bool
    target: str
    peer_cpu_s_per_gb: float
    cpu_s_per_gb: float
    peak_mb: float


def measure(
    command: Sequence[str], environ: dict[str, str] | None = None, fails: bool = False
) -> ClientRun:
    """Seconds, CPU seconds and peak memory of a command; it must succeed, or fail if told so."""
    started = time.perf_counter()
    process = subprocess.Popen(
        command,
        env={**os.environ, **(environ or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    stderr = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if (process.returncode != 0) != fails:
        raise RuntimeError(
            f"{command[0]} ended with {process.returncode}: {stderr.decode()[-500:]}"
        )
    return ClientRun(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6)


def add(first: ClientRun, second: ClientRun) -> ClientRun:
    """Two commands, one after the other."""
    return ClientRun(
        first.seconds + second.seconds,
        first.cpu_s + second.cpu_s,
        max(first.peak_mb, second.peak_mb),
    )


def make_row(
    client: str, peer: str, theirs: list[ClientRun], ours: list[ClientRun], target: str, gb: float
) -> Row:
    """The median over the rounds of how many times faster ours was."""
    ratios = _ratios(theirs, ours)
    return _row(client, peer, theirs, ours, "speed", ratios, target, gb)


def slowdown(
    client: str,
    against: str,
    clean: list[ClientRun],
    faulty: list[ClientRun],
    target: str,
    gb: float,
) -> Row:
    """How many times longer it took with the fault than without."""
    ratios = _ratios(faulty, clean)
    return _row(client, against, clean, faulty, "time", ratios, target, gb)


def _ratios(above: list[ClientRun], below: list[ClientRun]) -> list[float]:
    return round_ratios([run.seconds for run in above], [run.seconds for run in below])


def _row(
    client: str,
    peer: str,
    theirs: list[ClientRun],
    ours: list[ClientRun],
    ratio_of: str,
    ratios: list[float],
    target: str,
    gb: float,
) -> Row:
    def median(runs: list[ClientRun], name: str) -> float:
        values: list[float] = [getattr(run, name) for run in runs]
        return round(statistics.median(values), 3)

    return Row(
        client,
        peer,
        median(theirs, "seconds"),
        median(ours, "seconds"),
        ratio_of,
        round(statistics.median(ratios), 2),
        is_tie(ratios),
        target,
        round(median(theirs, "cpu_s") / gb, 2),
        round(median(ours, "cpu_s") / gb, 2),
        median(ours, "peak_mb"),
    )


def format_table(rows: Sequence[Row]) -> str:
    """The table of docs/fetch.md."""
    lines = [
        "| client | against | its s | s | ratio of | ratio | target | its CPU s/GB "
        "| CPU s/GB | MB |",
        "|---|---|--:|--:|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        ratio = f"{row.ratio:.2f}x" + (" (tie)" if row.is_tie else "")
        lines.append(
            f"| {row.client} | {row.peer} | {row.peer_s:.2f} | {row.seconds:.2f} "
            f"| {row.ratio_of} | {ratio} | {row.target} | {row.peer_cpu_s_per_gb:.2f} "
            f"| {row.cpu_s_per_gb:.2f} | {row.peak_mb:.0f} |"
        )
    return "\n".join(lines)
