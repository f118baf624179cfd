"""The tables and the picture of benchmarks/stream.py in docs/fetch.md and docs/grid.md."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench import RESULTS, ROOT, describe_source, format_table
from benchmarks.extract_doc import fill
from benchmarks.stream_promises import LOCAL, SMALL_DISK, STREAM, TWO_NODES
from benchmarks.stream_verdict import middle, tables

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "stream"
RECORD = RESULTS / f"{NAME}.json"
DOC, GRID_DOC = ROOT / "docs" / "fetch.md", ROOT / "docs" / "grid.md"
DISKS = {"all of it": STREAM, "15 % of it": SMALL_DISK, "2 nodes, each its share": TWO_NODES}
NOT_RUN = "There is no record of it yet."
PICTURE = "![seconds to the first step and of two epochs](../run_results/benchmarks/stream.svg)"
# Okabe and Ito's, told apart by colour-blind readers too.
PARTS = {
    "rewriting the data": "#CC79A7",
    "until the first step": "#E69F00",
    "rest of epoch 1": "#56B4E9",
    "epoch 2": "#0072B2",
}


def make_part(name: str, result: dict[str, Any]) -> str:
    """The tables, the picture, and where they come from."""
    shown = [format_table(*table) for table in tables(result)]
    return "\n\n".join([*shown, PICTURE, describe_source(result)])


def make_doc(text: str, record: Path) -> str:
    """docs/fetch.md with what the record says; without one, it says that there is none."""
    part = make_part(NAME, json.loads(record.read_text())) if record.exists() else NOT_RUN
    return fill(text, NAME, part)


def make_grid_doc(text: str, record: Path) -> str:
    """docs/grid.md with what smaller disks cost, by the record."""
    part = make_disks(json.loads(record.read_text())) if record.exists() else NOT_RUN
    return fill(text, "stream_disks", part)


def make_disks(result: dict[str, Any]) -> str:
    """The epochs of a tar of which a disk keeps all or a part."""
    rows = [
        [
            disk,
            *(f"{middle(result, way, column):.1f}" for column in ("epoch_1_s", "epoch_2_s")),
            f"{middle(result, way, 'bytes') / 1e9:.2f}",
        ]
        for disk, way in DISKS.items()
        if way in result["rows"]
    ]
    title = (
        f"{result['tar_bytes'] / 1e9:.2f} GB over a link of {result['rate'] / 1e6:g} MB/s, which "
        f"takes {result['link_s']:.1f} s for it; compute of an epoch {result['compute_s']:.1f} s"
    )
    header = ["the disk keeps", "end of epoch 1, s", "epoch 2, s", "GB sent in both"]
    return "\n\n".join([format_table(title, header, rows), describe_source(result)])


def list_parts(result: dict[str, Any], way: str) -> list[float]:
    """The seconds of PARTS."""
    conversion_s = middle(result, way, "conversion_s")
    first_s, end_s = (middle(result, way, name) for name in ("first_step_s", "epoch_1_s"))
    has_second = result["rows"][way][0]["epoch_2_s"] is not None
    second_s = middle(result, way, "epoch_2_s") if has_second else 0.0
    return [conversion_s, first_s - conversion_s, end_s - first_s, second_s]


def name_bar(result: dict[str, Any], way: str) -> str:
    """The way, and what its bar lacks."""
    if way == LOCAL:
        return f"{way} tar, no link"
    return way if result["rows"][way][0]["epoch_2_s"] is not None else f"{way}, 1 epoch"


def draw_picture(result: dict[str, Any], path: Path) -> None:
    """Writes the SVG: its own white ground, so that it can be read on a dark page too."""
    import matplotlib
    from matplotlib.figure import Figure

    # Text stays text; a fixed salt and no date, so that the same record gives the same bytes.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": NAME, "font.size": 9}):
        figure = Figure(figsize=(9.0, 4.2), layout="constrained", facecolor="white")
        axes = figure.add_subplot()
        _draw_bars(axes, result)
        figure.legend(loc="outside upper center", ncols=len(PARTS), frameon=False)
        figure.savefig(path, metadata={"Date": None})


def _draw_bars(axes: Axes, result: dict[str, Any]) -> None:
    ways = list(result["rows"])
    begin_s = [0.0] * len(ways)
    by_part = zip(*(list_parts(result, way) for way in ways), strict=True)
    for (label, colour), seconds in zip(PARTS.items(), by_part, strict=True):
        axes.barh(range(len(ways)), seconds, 0.7, begin_s, color=colour, label=label)
        begin_s = [a + b for a, b in zip(begin_s, seconds, strict=True)]
    names = [name_bar(result, way) for way in ways]
    axes.set_yticks(range(len(ways)), names)
    axes.get_yticklabels()[ways.index(STREAM)].set_fontweight("bold")
    axes.invert_yaxis()
    axes.axvline(result["link_s"], color="#333333", linewidth=1, linestyle="--")
    axes.annotate(
        " the link alone", (result["link_s"], -0.45), fontsize=8, color="#333333", va="bottom"
    )
    axes.set_xlabel("seconds")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, axis="x", color="#dddddd", linewidth=0.5)
    axes.set_axisbelow(True)


if __name__ == "__main__":
    DOC.write_text(make_doc(DOC.read_text(), RECORD))
    GRID_DOC.write_text(make_grid_doc(GRID_DOC.read_text(), RECORD))
    if RECORD.exists():
        draw_picture(json.loads(RECORD.read_text()), RECORD.with_suffix(".svg"))
