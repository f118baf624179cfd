"""The tables of benchmarks/osg_week.py in docs/grid.md, made from its record."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench import RESULTS, ROOT
from benchmarks.extract_doc import fill
from report.grid.replay import make_check_table, make_way_table, shape_replay
from report.table import to_markdown

DOC = ROOT / "docs" / "grid.md"
NAME = "osg_week"


def make_part(name: str, result: dict[str, Any]) -> str:
    """What the page shows of the record; it was computed, so no machine is named."""
    replay = shape_replay(result)
    tables = [to_markdown(table) for table in (make_check_table(replay), make_way_table(replay))]
    source = f"Replayed on {result['date']} at commit {result['commit']} with"
    return "\n".join([*tables, f"{source}\n`{result['command']}`."])


if __name__ == "__main__":
    record = json.loads((RESULTS / f"{NAME}.json").read_text())
    DOC.write_text(fill(DOC.read_text(), NAME, make_part(NAME, record)))
