"""docs/imagenet.md names the archives as the table that we verify by has them."""

from __future__ import annotations

from pathlib import Path

from dataset.known_archives import published_archives

PAGE = Path(__file__).resolve().parents[2] / "docs" / "imagenet.md"


def test_the_page_has_the_sizes_counts_and_sums_of_the_published_archives() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `ILSVRC2012")]
    archives = published_archives().values()
    assert len(rows) == len(archives) == 2
    for archive in archives:
        (row,) = [row for row in rows if f"`{archive.file}`" in row]
        assert f"| {archive.num_bytes:,} (" in row and f"| {archive.num_images:,}" in row
        assert f"`{archive.md5}`" in row
