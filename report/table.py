"""A table as data: the same rows as Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Value = str | int | float | bool | None


@dataclass(frozen=True)
class Cell:
    """What a person reads, and the number or word behind it (for sorting, CSV and JSON)."""

    text: str
    value: Value = None


@dataclass(frozen=True)
class Column:
    """A column: its key in CSV and JSON, and its heading on a page."""

    key: str
    heading: str
    is_number: bool = True


@dataclass(frozen=True)
class Table:
    """Rows of cells under columns; `data` has the raw records of CSV and JSON."""

    name: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    data: tuple[Mapping[str, Value], ...] = ()
    notes: tuple[str, ...] = field(default=())

    def without_empty_columns(self, keep: Sequence[str] = ()) -> Table:
        """The same table without the columns in which nothing is written."""
        used = [
            index
            for index, column in enumerate(self.columns)
            if column.key in keep or any(row[index].text for row in self.rows)
        ]
        columns = tuple(self.columns[i] for i in used)
        rows = tuple(tuple(row[i] for i in used) for row in self.rows)
        return Table(self.name, self.caption, columns, rows, self.data, self.notes)


def to_markdown(table: Table) -> str:
    """The table with its caption above and its notes below, aligned for reading as text."""
    headings = [column.heading for column in table.columns]
    body = [[_escape(cell.text) for cell in row] for row in table.rows]
    widths = [max(3, *(len(row[i]) for row in [headings, *body])) for i in range(len(headings))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if column.is_number else cell.ljust(width)
            for cell, width, column in zip(cells, widths, table.columns, strict=True)
        ]
        return "| " + " | ".join(padded) + " |"

    rule = [
        "-" * (width - 1) + (":" if column.is_number else "-")
        for width, column in zip(widths, table.columns, strict=True)
    ]
    lines = [line(headings), "| " + " | ".join(rule) + " |", *map(line, body)]
    above = [f"**{table.caption}**", ""] if table.caption else []
    below = ["", *(f"- {note}" for note in table.notes)] if table.notes else []
    return to_writable("\n".join([*above, *lines, *below]) + "\n")


def to_csv(tables: Sequence[Table]) -> str:
    """The raw records of tables of one kind, one header for all."""
    records = [record for table in tables for record in _records(table)]
    keys = list(dict.fromkeys(key for record in records for key in record))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, keys, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return to_writable(buffer.getvalue())


def to_json(tables: Sequence[Table]) -> str:
    """Every table with its caption, notes and raw records."""
    whole = [
        {
            "name": table.name,
            "caption": table.caption,
            "notes": list(table.notes),
            "rows": [dict(record) for record in _records(table)],
        }
        for table in tables
    ]
    return json.dumps(whole, indent=1, allow_nan=False) + "\n"


def to_writable(text: str) -> str:
    """The text as any file and terminal takes it: a file name may hold bytes that are no UTF-8."""
    return text.encode("utf-8", "replace").decode()


def _records(table: Table) -> list[Mapping[str, Value]]:
    """The raw records; of a table without them, the values of its cells."""
    if table.data or not table.rows:
        return list(table.data)
    keys = [column.key for column in table.columns]
    return [{key: cell.value for key, cell in zip(keys, row, strict=True)} for row in table.rows]


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
