"""Prints the fault table of docs/fetch.md: every fault alone, run now, with its outcome."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

from tests.cluster.osdf import service
from tests.cluster.osdf.fetch_cases import CASES, Case
from tests.cluster.osdf.fetching import MIB, Fetcher, Result, make_content
from tests.cluster.osdf.test_fetch_faults import SIZE, run_case

OUTCOMES = {0: "right bytes", 2: "exit 2", 3: "exit 3, no file", 75: "exit 75, partial kept"}


def main() -> None:
    logging.disable(logging.CRITICAL)
    was_up = service.is_up()
    service.up()
    content = make_content(SIZE)
    path = service.put("fault-table/object.bin", content)
    try:
        with tempfile.TemporaryDirectory() as out:
            clean = Fetcher(service, Path(out))(path)
        print(f"One object of {SIZE / MIB:.0f} MiB; without a fault {clean.seconds:.1f} s.\n")
        print("| fault | how it ends | s | MiB twice: wrong | hedged | in flight | other |")
        print("|---|---|--:|--:|--:|--:|--:|")
        for case in CASES:
            with tempfile.TemporaryDirectory() as out:
                result = run_case(case, service, path, content, Path(out))
                print(format_row(case, result, content), flush=True)
    finally:
        service.remove(path)
        if not was_up:
            service.down()


def format_row(case: Case, result: Result, content: bytes) -> str:
    """One line of the table; a case that ended otherwise than it must stands out."""
    outcome = OUTCOMES[result.exit_code]
    if result.exit_code == 0 and result.path.read_bytes() != content:
        outcome = "**WRONG BYTES**"
    if result.exit_code != case.exit_code:
        outcome = f"**{outcome}, not {OUTCOMES[case.exit_code]}**"
    twice = {name: count / MIB for name, count in result.summary.bytes_twice.items()}
    other = twice.get("skipped", 0) + twice.get("compared", 0)
    numbers = [twice.get("wrong", 0), twice.get("hedged", 0), twice.get("in_flight", 0), other]
    cells = " | ".join(f"{number:.1f}" for number in numbers)
    return f"| {case.name} | {outcome} | {result.seconds:.1f} | {cells} |"


if __name__ == "__main__":
    main()
