"""Who published a table: the sources.csv beside it, one row a file."""

from __future__ import annotations

from pathlib import Path

from dataset.errors import UserError
from report.runs import read_csv

SOURCES_FILE = "sources.csv"
_COLUMNS = ("file", "authors", "title", "published_in")


def cite(table: Path) -> str:
    """Title, authors and place of a published table as one line; empty if unknown."""
    sources = table.with_name(SOURCES_FILE)
    if not sources.is_file():
        return ""
    try:
        rows = read_csv(sources, _COLUMNS)
    except UserError:  # a file of this name that is not ours
        return ""
    for _, row in rows:
        if row["file"] == table.name:
            return f"Source: '{row['title']}', {row['authors']}, {row['published_in']}."
    return ""
