"""Messages have the right plural."""

from __future__ import annotations

from pathlib import Path

from dataset.archive.extract import Result
from dataset.words import count


def test_one_is_singular_and_all_else_plural() -> None:
    assert [count(n, "file") for n in (0, 1, 2)] == ["0 files", "1 file", "2 files"]
    assert [count(n, "class", "classes") for n in (1, 2)] == ["1 class", "2 classes"]


def test_an_extraction_of_one_image_says_so(tmp_path: Path) -> None:
    facts = {"num_classes": 1, "num_images": 1, "num_bytes": 5, "num_skipped": 1, "checked": ""}
    told = Result(**facts, num_bytes_written=5).describe()  # type: ignore[arg-type]
    assert told.startswith("1 class, 1 image, 5 bytes in ")
    assert told.endswith(", 1 file that is not an image left out")
