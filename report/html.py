"""HTML from tables, pictures and words: the page's building blocks, everything escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import quote

from report.plots import Chart
from report.table import Cell, Column, Table, to_csv, to_writable

ASSETS = Path(__file__).parent / "assets"
SHORT_CHARS = 20  # a cell up to this length is not broken into lines


@dataclass(frozen=True)
class Section:
    """A part of the page with its place in the menu."""

    anchor: str
    title: str
    body: str


def render_page(title: str, lead: str, sections: Sequence[Section], footer: str) -> str:
    """The whole page in one file: style, script and pictures inside, nothing from a network."""
    shown = [section for section in sections if section.body]
    menu = "".join(f'<a href="#{s.anchor}">{escape(s.title)}</a>' for s in shown)
    parts = "".join(
        f'<section id="{s.anchor}"><h2>{escape(s.title)}</h2>{s.body}</section>\n' for s in shown
    )
    return to_writable(
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # The browser itself refuses anything that is not in this file.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:\">\n"
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{_asset('page.css')}</style></head>\n<body>\n"
        f'<header><h1>{escape(title)}</h1><button id="theme" type="button">dark / light</button>'
        f'</header>\n<p class="soft">{escape(lead)}</p>\n<nav>{menu}</nav>\n<main>{parts}</main>\n'
        f'<footer class="soft">{escape(footer)}</footer>\n'
        f"<script>{_asset('page.js')}</script>\n</body></html>\n"
    )


def table_html(table: Table, heading: str | None = None) -> str:
    """A table that sorts, with its notes and a link that saves it as CSV."""
    head = "".join(
        f'<th scope="col"{_class(column)}>'
        f'<button type="button">{escape(column.heading)}</button></th>'
        for column in table.columns
    )
    rows = "".join(
        "<tr>" + "".join(map(_cell_html, row, table.columns)) + "</tr>\n" for row in table.rows
    )
    data = quote(to_csv([table]))
    return (
        f'<div class="head"><h3>{escape(heading or table.caption)}</h3>'
        f'<a class="csv soft" download="{escape(table.name)}.csv" '
        f'href="data:text/csv;charset=utf-8,{data}">CSV</a></div>\n'
        f'<div class="scroll" tabindex="0"><table data-name="{escape(table.name)}">'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>\n"
        f"{notes_html(table.notes)}"
    )


def _cell_html(cell: Cell, column: Column) -> str:
    value = cell.value
    number = "" if value is None or isinstance(value, str | bool) else f' data-value="{value!r}"'
    # Markdown's italics mark a predicted value.
    text = re.sub(r"^\*(.*)\*$", r"<em>\1</em>", escape(cell.text))
    return f"<td{_class(column, cell)}{number}>{text}</td>"


def _class(column: Column, cell: Cell | None = None) -> str:
    if column.is_number:
        return ' class="number"'
    if cell is None or not cell.text:
        return ""
    return ' class="short"' if len(cell.text) <= SHORT_CHARS else ' class="long"'


def charts_html(charts: Sequence[Chart]) -> str:
    """Pictures side by side where there is room."""
    return side_by_side([figure_html(chart) for chart in charts])


def side_by_side(figures: Sequence[str]) -> str:
    return f'<div class="charts">{"".join(figures)}</div>\n' if figures else ""


def figure_html(chart: Chart) -> str:
    """One picture with its title."""
    caption = f"<figcaption>{escape(chart.title)}</figcaption>"
    return f'<figure data-name="{escape(chart.name)}">{caption}{chart.svg}</figure>\n'


def notes_html(notes: Sequence[str], is_warning: bool = False) -> str:
    if not notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<ul class="notes{" warnings" if is_warning else ""}">{items}</ul>\n'


def tiles_html(tiles: Sequence[tuple[str, str]]) -> str:
    """Big numbers, each above what it counts."""
    inner = "".join(
        f'<div class="tile"><b>{escape(number)}</b>{escape(words)}</div>' for number, words in tiles
    )
    return f'<div class="tiles">{inner}</div>\n'


def _asset(name: str) -> str:
    return (ASSETS / name).read_text()
