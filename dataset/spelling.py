"""Names in addresses and on the disk: percent-encoded there, bytes here, UTF-8 or not."""

from __future__ import annotations

from urllib.parse import quote, unquote

_ERRORS = "surrogateescape"  # as Python has such names of files: every byte is kept


def decode(text: str) -> str:
    """A percent-encoded path as a path of the disk."""
    return unquote(text, errors=_ERRORS)


def encode(text: str, safe: str = "/") -> str:
    """A path of the disk, percent-encoded."""
    return quote(text, safe=safe, errors=_ERRORS)
