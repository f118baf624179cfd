"""The tables of docs/fetch.md and docs/studies.md that come from measured records."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import placement
from benchmarks.bench import PAIRED, RESULTS, ROOT, describe_source, format_table
from benchmarks.extract_doc import fill
from benchmarks.fetch_table import Row
from benchmarks.fetch_table import format_table as format_rows

OUTCOMES = {0: "right bytes", 2: "exit 2", 3: "exit 3, no file", 75: "exit 75, partial kept"}
FETCH, STUDIES = ROOT / "docs" / "fetch.md", ROOT / "docs" / "studies.md"


def fetch_table(result: dict[str, Any]) -> str:
    """The rows of benchmarks/fetch.py."""
    rounds = f"{result['rounds']} rounds on loopback, {result['wan_rounds']} over the WAN"
    return f"{rounds}\n\n{format_rows([Row(**row) for row in result['rows']])}\n\n{PAIRED}"


def fault_table(result: dict[str, Any]) -> str:
    """Each fault, how the fetch ended, and what it cost."""
    mib = result["object_bytes"] / 2**20
    title = f"One object of {mib:.0f} MiB; without a fault {result['clean_s']:.1f} s."
    header = ["fault", "how it ends", "s", "stalls", "MiB twice: wrong", "in flight", "other"]
    return format_table(title, header, [_fault_row(row) for row in result["faults"]])


def _fault_row(row: dict[str, Any]) -> list[str]:
    """A fetch that ended otherwise than it must stands out."""
    outcome = OUTCOMES[row["exit_code"]] if row["is_right"] else "**WRONG BYTES**"
    if row["exit_code"] != row["must_exit"]:
        outcome = f"**{outcome}, not {OUTCOMES[row['must_exit']]}**"
    twice = {name: count / 2**20 for name, count in row["bytes_twice"].items()}
    other = sum(mib for name, mib in twice.items() if name not in ("wrong", "in_flight"))
    counts = [twice.get("wrong", 0.0), twice.get("in_flight", 0.0), other]
    cells = [row["fault"], outcome, f"{row['seconds']:.1f}", str(row["stalls"])]
    return [*cells, *(f"{count:.1f}" for count in counts)]


def placement_table(result: dict[str, Any]) -> str:
    """Five ways to bring data to jobs."""
    [table] = placement.tables(result)
    return f"{format_table(*table)}\n\n{PAIRED}"


# name of the record and of its place -> page, and what the page shows of it
MAKERS: dict[str, tuple[Path, Callable[[dict[str, Any]], str]]] = {
    "fault_table": (FETCH, fault_table),
    "fetch": (FETCH, fetch_table),
    "placement": (STUDIES, placement_table),
}


def make_part(name: str, result: dict[str, Any]) -> str:
    """What the page shows of a record."""
    return f"{MAKERS[name][1](result)}\n\n{describe_source(result)}"


def make_doc(page: Path) -> str:
    """A page with the tables of the records that are there."""
    text = page.read_text()
    for name, (where, _) in MAKERS.items():
        path = RESULTS / f"{name}.json"
        if where == page and path.exists():
            text = fill(text, name, make_part(name, json.loads(path.read_text())))
    return text


if __name__ == "__main__":
    for page in (FETCH, STUDIES):
        page.write_text(make_doc(page))
