"""The table and the picture of benchmarks/convergence.py in docs/training.md, from its record."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench import RESULTS, ROOT, describe_source, format_table
from benchmarks.convergence_picture import draw_picture
from benchmarks.convergence_verdict import describe_second_looks, judge, summarise, tables
from benchmarks.extract_doc import fill_from

RECORD = RESULTS / "convergence.json"
DOC = ROOT / "docs" / "training.md"
WIDTH = 120  # of a line of the docs
NOT_RUN = "There is no record of it yet, so no training here has shown it either."
PICTURE = "![accuracy by epoch in three orders](../run_results/benchmarks/convergence.svg)"


def make_part(result: dict[str, Any]) -> str:
    """The finding, the table, the picture, and where they come from."""
    found = "\n".join(f"- {line}" for line in summarise(judge(result["runs"])).splitlines())
    shown = [format_table(*table) for table in tables(result)]
    looks = [textwrap.fill(text, WIDTH) for text in describe_second_looks(result)]
    return "\n\n".join([found, *shown, *looks, PICTURE, describe_sources(result)])


def describe_sources(result: dict[str, Any]) -> str:
    """Where the runs come from: all from one command, or some from the records before it."""
    earlier = result.get("earlier", [])
    if not earlier:
        return describe_source(result)
    num_new = len(result["runs"]) - sum(facts["num_runs"] for facts in earlier)
    sources = [*earlier, result | {"num_runs": num_new}]
    lines = [f"- {facts['num_runs']} runs. {describe_source(facts)}" for facts in sources]
    return "\n".join(lines).replace("\n`", "\n  `")


def make_doc(text: str, record: Path) -> str:
    """docs/training.md with what the record says; without one, it says that there is none."""
    return fill_from(text, record, make_part, NOT_RUN)


if __name__ == "__main__":
    DOC.write_text(make_doc(DOC.read_text(), RECORD))
    if RECORD.exists():
        draw_picture(json.loads(RECORD.read_text()), RECORD.with_suffix(".svg"))
