"""The pictures of the docs: parts of report pages, taken by a real browser.

    python -m tests.report.pictures

shows run_results/published/report.html and the pages of run_results/cpu/two-core-example and of
run_results/examples, and writes docs/pictures/*.png.
"""

from __future__ import annotations

import base64
import io
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from dataset.errors import run_command
from dataset.flags import make_parser
from tests.report.chromium import Browser, start_browser

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "run_results" / "published" / "report.html"
STUDY = ROOT / "run_results" / "cpu" / "two-core-example"
EXAMPLES = ROOT / "run_results" / "examples"  # docs/search.md has the commands
FOLDER = ROOT / "docs" / "pictures"
WIDTH = 1180  # CSS pixels
SCALE = 1.4  # GitHub shows about 1000 pixels; the rest is for dense screens
NUM_COLOURS = 96
MARGIN, SCROLL_BAR = 12, 16


@dataclass(frozen=True)
class Picture:
    """A part of a page, from the top of one element to the bottom of another (CSS selectors)."""

    name: str
    first: str
    last: str
    whole_px: int = 0  # shows the page this wide, and tables whole that would scroll


OF_PUBLISHED = (Picture("report", "header", "#scaling .charts"),)
OF_STUDY = (
    Picture("time", "#time figure", "#time figure"),
    Picture("learning", "#learning .charts", "#learning .charts"),
)
OF_GALAXY = (
    Picture("search", "#search .charts", "#search .charts"),
    Picture("workflow", "#stages", "#stages", whole_px=1560),
)
OF_CRISIS = (Picture("evaluation", "#evaluation h3", "#evaluation .mistakes"),)
_WIDEN = """document.head.insertAdjacentHTML("beforeend",
  "<style>body {{ max-width: none; width: {px}px }} .scroll {{ max-height: none }}</style>")"""
_FIND = """(() => {{
  const box = (selector) => document.querySelector(selector).getBoundingClientRect();
  const first = box({first!r}), last = box({last!r});
  return [first.top + scrollY, last.right, last.bottom + scrollY];
}})()"""


def main() -> None:
    """Takes them all."""
    parser = make_parser(__doc__, prog="python -m tests.report.pictures")
    parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, start_browser(Path(folder)) as browser:
        pages: list[tuple[Path, Sequence[Picture]]] = [(PUBLISHED, OF_PUBLISHED)]
        of_records = (
            (STUDY, OF_STUDY),
            (EXAMPLES / "galaxy", OF_GALAXY),
            (EXAMPLES / "crisis", OF_CRISIS),
        )
        for runs, of_runs in of_records:
            page = Path(folder, f"{runs.name}.html")
            script = ROOT / "scripts" / "report.py"
            words = ["--out", str(page), str(runs.relative_to(ROOT))]  # a picture shows the path
            subprocess.run([sys.executable, script, *words], check=True, cwd=ROOT)
            pages.append((page, of_runs))
        for path, pictures in pages:
            browser.open(path, width=WIDTH)
            for picture in pictures:
                save(browser, picture)


def save(browser: Browser, picture: Picture) -> None:
    """Writes one picture and says its size."""
    path = FOLDER / f"{picture.name}.png"
    path.write_bytes(compress(take(browser, picture)))
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size // 1000} kB")


def take(browser: Browser, picture: Picture) -> bytes:
    """The PNG of a part of the page, with a margin around it."""
    if picture.whole_px:
        browser.run(_WIDEN.format(px=picture.whole_px))
    top, right, end = browser.run(_FIND.format(first=picture.first, last=picture.last))
    y = max(0, top - MARGIN)
    # Without its scroll bar the page is a little wider than it was measured.
    width = min(max(WIDTH, picture.whole_px), right + SCROLL_BAR + MARGIN)
    clip = {"x": 0, "y": y, "scale": SCALE, "width": width, "height": end + MARGIN - y}
    options = {"format": "png", "captureBeyondViewport": True, "clip": clip}
    return base64.b64decode(browser.ask("Page.captureScreenshot", **options)["data"])


def compress(png: bytes, num_colours: int = NUM_COLOURS) -> bytes:
    """The same picture with few colours: a page of charts and text has no more."""
    small = io.BytesIO()
    with Image.open(io.BytesIO(png)) as image:
        reduced = image.convert("RGB").quantize(num_colours, dither=Image.Dither.NONE)
        reduced.save(small, "PNG", optimize=True)
    return small.getvalue()


if __name__ == "__main__":
    sys.exit(run_command(main))
