"""Names in addresses (percent-encoded) and on the disk (bytes, UTF-8 or not)."""

from __future__ import annotations

from urllib.parse import quote, unquote

_ERRORS = "surrogateescape"  # as Python decodes file names: every byte is kept


def decode(text: str) -> str:
    """A percent-encoded path as a path of the disk."""
    return unquote(text, errors=_ERRORS)


def encode(text: str, safe: str = "/") -> str:
    """A path of the disk, percent-encoded."""
    return quote(text, safe=safe, errors=_ERRORS)
