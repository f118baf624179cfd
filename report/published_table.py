"""A published table: the rows of its CSV, and who published it (the sources.csv beside it)."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from dataset.errors import UserError

SOURCES_FILE = "sources.csv"
_COLUMNS = ("file", "authors", "title", "published_in")


def read_csv(path: Path, columns: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    """The rows of a table with their line numbers, missing cells as empty text."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, restval="")
            names = reader.fieldnames or []
            missing = [name for name in columns if name not in names]
            if missing:
                needed = ",".join(columns)
                raise UserError(f"{path} lacks the column {missing[0]}; it needs {needed}")
            return [(reader.line_num, {name: row[name] for name in names}) for row in reader]
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no CSV table ({error}); give one with {columns[0]}") from None


def read_header(path: Path) -> list[str]:
    """The names of the columns; nothing for a file that is no CSV, which read_csv refuses."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            return next(csv.reader(file), [])
    except (OSError, csv.Error, UnicodeDecodeError):
        return []


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
