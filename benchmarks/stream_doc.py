"""The tables and the picture of benchmarks/stream.py in docs/fetch.md and docs/grid.md."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench import RESULTS, ROOT, describe_source, format_table
from benchmarks.extract_doc import fill
from benchmarks.stream_promises import (
    DISK_SHARES,
    HALF_DISK,
    LOCAL,
    SMALL_DISK,
    STREAM,
    TWO_NODES,
)
from benchmarks.stream_verdict import middle, note_disturbed, tables

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "stream"
RECORD = RESULTS / f"{NAME}.json"
DOC, GRID_DOC = ROOT / "docs" / "fetch.md", ROOT / "docs" / "grid.md"
DISKS = {
    "all of it": STREAM,
    "50 % of it": HALF_DISK,
    "15 % of it": SMALL_DISK,
    "2 nodes, each its share": TWO_NODES,
}
NUM_INDEXES = {TWO_NODES: 2}  # that are sent for a row, where it is not one
HELD = """\
A disk holds what is kept for good, what is in use at a time, and what is on its way. What a
smaller one kept is the share of the tar that was not sent again for epoch 2."""
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
    return "\n\n".join([*shown, PICTURE, describe_decoder(result), describe_source(result)])


def describe_decoder(result: dict[str, Any]) -> str:
    """How our rows decoded; Pillow did it in the records that do not say so."""
    decoder = {"kernel": "the JPEG kernel"}.get(result.get("decoder", ""), "Pillow")
    return f"Our rows decoded with {decoder}."


def make_doc(text: str, record: Path) -> str:
    """docs/fetch.md with what the record says; without one, it says that there is none."""
    part = make_part(NAME, json.loads(record.read_text())) if record.exists() else NOT_RUN
    return fill(text, NAME, part)


def make_grid_doc(text: str, record: Path) -> str:
    """docs/grid.md with what smaller disks cost, by the record."""
    part = make_disks(json.loads(record.read_text())) if record.exists() else NOT_RUN
    return fill(text, "stream_disks", part)


def make_disks(result: dict[str, Any]) -> str:
    """The epochs of a tar of which a disk holds all or a part."""
    rows = [make_disk(result, disk, way) for disk, way in DISKS.items() if way in result["rows"]]
    title = (
        f"{result['tar_bytes'] / 1e9:.2f} GB over a link of {result['rate'] / 1e6:g} MB/s, which "
        f"takes {result['link_s']:.1f} s for it; compute of an epoch {result['compute_s']:.1f} s, "
        f"or {count_images(result) / result['compute_s']:.0f} images/s"
    )
    header = ["the disk holds", "kept", "end of epoch 1, s", "epoch 2, s", "GB sent again"]
    header += ["images/s in epoch 2"]
    return "\n\n".join([format_table(title, header, rows), HELD, describe_source(result)])


def make_disk(result: dict[str, Any], disk: str, way: str) -> list[str]:
    """One disk: what a small one kept follows from what was sent again; the others keep all."""
    indexes = NUM_INDEXES.get(way, 1) * result["index_bytes"]
    again = max(0.0, middle(result, way, "bytes") - result["tar_bytes"] - indexes)
    kept = 1 - again / result["tar_bytes"] if way in DISK_SHARES else 1.0
    epoch_2_s = middle(result, way, "epoch_2_s")
    return [
        disk + note_disturbed(result, way),
        f"{kept:.0%}",
        f"{middle(result, way, 'epoch_1_s'):.1f}",
        f"{epoch_2_s:.1f}",
        f"{again / 1e9:.2f}",
        f"{count_images(result) / epoch_2_s:.0f}",
    ]


def count_images(result: dict[str, Any]) -> int:
    """Of an epoch: what does not fill a batch is left out."""
    return int(result["steps"] * result["batch"])


def list_parts(result: dict[str, Any], way: str) -> list[float]:
    """The seconds of PARTS."""
    conversion_s = middle(result, way, "conversion_s")
    first_s, end_s = (middle(result, way, name) for name in ("first_step_s", "epoch_1_s"))
    has_second = result["rows"][way][0]["epoch_2_s"] is not None
    second_s = middle(result, way, "epoch_2_s") if has_second else 0.0
    return [conversion_s, first_s - conversion_s, end_s - first_s, second_s]


def name_bar(result: dict[str, Any], way: str) -> str:
    """The way, what its bar lacks, and how much it was disturbed."""
    if way == LOCAL:
        name = f"{way} tar, no link"
    elif result["rows"][way][0]["epoch_2_s"] is not None:
        name = way
    else:
        name = f"{way}, 1 epoch"
    return name + note_disturbed(result, way)


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
