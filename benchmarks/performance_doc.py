"""The tables of docs/performance.md, made from the JSON files of the trainer's benchmarks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import (
    ddp,
    epoch_overhead,
    loader,
    loader_latency,
    memory,
    order,
    startup_exchange,
    step,
    time_to_first_step,
)
from benchmarks.bench import OF_MEDIANS, PAIRED, ROOT, Table, describe_source, format_table
from benchmarks.extract_doc import fill_all

DOC = ROOT / "docs" / "performance.md"
MAKERS: dict[str, Callable[[dict[str, Any]], list[Table]]] = {
    "loader": loader.tables,
    "loader_latency": loader_latency.tables,
    "step": step.tables,
    "ddp": ddp.tables,
    "epoch_overhead": epoch_overhead.tables,
    "time_to_first_step": time_to_first_step.tables,
    "startup_exchange": startup_exchange.tables,
    "order": order.tables,
    "memory": memory.tables,
}
# How the ratios of a benchmark are made; the others show none.
NOTES = dict.fromkeys(
    ("loader", "loader_latency", "step", "ddp", "time_to_first_step", "order"), PAIRED
) | {"epoch_overhead": OF_MEDIANS}


def make_part(name: str, result: dict[str, Any]) -> str:
    """The tables of a benchmark, what they were measured on, and the command."""
    parts = [format_table(*table) for table in MAKERS[name](result)]
    if name == "time_to_first_step":
        parts.append(time_to_first_step.name_largest(result))
    if name in NOTES:
        parts.append(NOTES[name])
    return "\n\n".join([*parts, describe_source(result)])


if __name__ == "__main__":
    DOC.write_text(fill_all(DOC.read_text(), MAKERS, make_part))
