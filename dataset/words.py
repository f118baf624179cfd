"""Numbers with their nouns, for messages: 1 image, 2 images."""

from __future__ import annotations


def count(number: int, one: str, many: str = "") -> str:
    """`1 file`, `2 files`; `many` is for a plural that does not just add an s."""
    return f"{number} {one if number == 1 else many or one + 's'}"
