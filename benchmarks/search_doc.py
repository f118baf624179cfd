"""The table and the picture of benchmarks/search.py in docs/search.md, from its record."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench import RESULTS, ROOT, describe_source, format_table
from benchmarks.extract_doc import fill_from
from benchmarks.search_picture import draw_picture
from benchmarks.search_verdict import judge, summarise, tables

RECORD = RESULTS / "search.json"
DOC = ROOT / "docs" / "search.md"
NOT_RUN = "There is no record of it yet."
PICTURE = "![the table, and the best so far by trial](../run_results/benchmarks/search.svg)"


def make_part(result: dict[str, Any]) -> str:
    """The finding, the table, the picture, and where they come from."""
    found = "\n".join(f"- {line}" for line in summarise(judge(result)).splitlines())
    shown = [format_table(*table) for table in tables(result)]
    source = f"{describe_source(result)} Optuna {result['optuna']}."
    return "\n\n".join([found, *shown, PICTURE, source])


def make_doc(text: str, record: Path) -> str:
    """docs/search.md with what the record says; without one, it says that there is none."""
    return fill_from(text, record, make_part, NOT_RUN)


if __name__ == "__main__":
    DOC.write_text(make_doc(DOC.read_text(), RECORD))
    if RECORD.exists():
        draw_picture(json.loads(RECORD.read_text()), RECORD.with_suffix(".svg"))
