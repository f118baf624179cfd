"""Numbers and JSON that others wrote: read within bounds, or refused with a ValueError."""

from __future__ import annotations

import json
import math
import re
from typing import Any

MAX_COUNT = 1 << 60  # bytes: 1 EiB, far beyond any object, and sums of it still fit 64 bits
MAX_JSON_BYTES = 1 << 20
MAX_JSON_DEPTH = 32
MAX_DIGITS = 20
_SHOWN = 40  # characters of a bad value in a message

# Strings are matched as a whole, so that brackets in them do not count. The closing quote is
# optional: an unterminated string is then matched once, not again from every quote inside it.
_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"?|[\[{]|[\]}]', re.DOTALL)


def shorten(value: object) -> str:
    """A value for a message: quoted, and never longer than a few words."""
    text = value if isinstance(value, str) else repr(value)
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")


def parse_count(text: str, largest: int = MAX_COUNT) -> int:
    """A whole number in ASCII digits, as in headers: no sign, no space, no '²'."""
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise ValueError(f"{shorten(text)} is not a whole number")
    return check_count(int(text), largest)


def parse_number(text: str, largest: float) -> float:
    """A decimal number above 0 and up to `largest`, such as 0.5 or 50."""
    if not re.fullmatch(r"[0-9]{1,15}(?:\.[0-9]{0,15})?", text.strip(), re.ASCII):
        raise ValueError(f"{shorten(text)} is not a number")
    value = float(text)
    if not 0 < value <= largest:
        raise ValueError(f"{shorten(text)} is not above 0 and up to {largest:g}")
    return value


def check_count(value: Any, largest: int = MAX_COUNT) -> int:
    """The value, if it is an integer from 0 to `largest` (JSON's true is none)."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= largest:
        raise ValueError(f"{shorten(value)} is not a whole number from 0 to {largest}")
    return value


def check_text(value: Any) -> str:
    """The value, if it is a string."""
    if not isinstance(value, str):
        raise ValueError(f"{shorten(value)} is not a string")
    return value


def parse_json(data: str | bytes, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The value of a JSON text without deep nesting, huge numbers, Infinity or NaN."""
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    if len(raw) > max_bytes:
        raise ValueError(f"JSON of {len(raw)} bytes, more than {max_bytes}")
    if raw.count(b"[") + raw.count(b"{") > MAX_JSON_DEPTH and _depth(raw) > MAX_JSON_DEPTH:
        raise ValueError(f"JSON nested more than {MAX_JSON_DEPTH} deep")
    return _DECODER.decode(raw.decode())


def _depth(raw: bytes) -> int:
    """How deep the brackets of a JSON text are nested."""
    depth = deepest = 0
    for match in _BRACKETS.finditer(raw):
        if match[0] in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif match[0] in b"]}":
            depth -= 1
    return deepest


def _parse_int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"{shorten(text)} is a number with too many digits")
    return int(text)


def _parse_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{shorten(text)} is too large a number")
    return value


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is not a number")


_DECODER = json.JSONDecoder(parse_int=_parse_int, parse_float=_parse_float, parse_constant=_refuse)
