"""What the pictures of the benchmarks share."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def svg_style(salt: str) -> AbstractContextManager[None]:
    """Text stays text; with a fixed salt and no date, the same record gives the same bytes."""
    import matplotlib

    return matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 9})


def tidy(axes: Axes) -> None:
    """A light grid behind the lines, and no frame above and to the right."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#dddddd", linewidth=0.5)
    axes.set_axisbelow(True)
