"""Measured commands and the table of ratios of benchmarks/fetch.py."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """One transfer by one client."""

    seconds: float
    cpu_s: float
    peak_mb: float


@dataclass(frozen=True)
class Row:
    """One line of the table: ours against a peer in the same rounds."""

    question: str
    peer: str
    peer_s: float
    ours_s: float
    ratio: float
    wanted: str
    peer_cpu_s_per_gb: float
    ours_cpu_s_per_gb: float
    ours_peak_mb: float


def measure(
    command: Sequence[str], environ: dict[str, str] | None = None, fails: bool = False
) -> Run:
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
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6)


def add(first: Run, second: Run) -> Run:
    """Two commands, one after the other."""
    return Run(
        first.seconds + second.seconds,
        first.cpu_s + second.cpu_s,
        max(first.peak_mb, second.peak_mb),
    )


def make_row(
    question: str, peer: str, theirs: list[Run], ours: list[Run], wanted: str, gb: float
) -> Row:
    """The median over the rounds of how many times faster ours was."""
    ratios = [theirs[n].seconds / ours[n].seconds for n in range(len(ours))]
    return _row(question, peer, theirs, ours, statistics.median(ratios), wanted, gb)


def slowdown(
    question: str, against: str, clean: list[Run], faulty: list[Run], wanted: str, gb: float
) -> Row:
    """How many times longer it took with the fault than without."""
    ratios = [faulty[n].seconds / clean[n].seconds for n in range(len(clean))]
    return _row(question, against, clean, faulty, statistics.median(ratios), wanted, gb)


def _row(
    question: str,
    peer: str,
    theirs: list[Run],
    ours: list[Run],
    ratio: float,
    wanted: str,
    gb: float,
) -> Row:
    def median(runs: list[Run], name: str) -> float:
        return round(statistics.median(getattr(run, name) for run in runs), 3)

    return Row(
        question,
        peer,
        median(theirs, "seconds"),
        median(ours, "seconds"),
        round(ratio, 2),
        wanted,
        round(median(theirs, "cpu_s") / gb, 2),
        round(median(ours, "cpu_s") / gb, 2),
        median(ours, "peak_mb"),
    )


def format_table(rows: Sequence[Row]) -> str:
    """The table of docs/fetch.md."""
    lines = [
        "| question | against | its s | our s | ratio | wanted | its CPU s/GB | ours | our MB |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        lines.append(
            f"| {row.question} | {row.peer} | {row.peer_s:.2f} | {row.ours_s:.2f} "
            f"| {row.ratio:.2f} | {row.wanted} | {row.peer_cpu_s_per_gb:.2f} "
            f"| {row.ours_cpu_s_per_gb:.2f} | {row.ours_peak_mb:.0f} |"
        )
    return "\n".join(lines)
