"""A run.json in the shape that the tables rely on; what has another type is left out, and said."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from train.records.record import PHASES, Record

MAX_CHARS = 200  # of a name in a table
LEAST, MOST = 1e-6, 1e15  # of any measured number: products of some of them stay finite

_TEXTS = ("run_id", "status", "device", "commit", "host", "communication_method")
_OBJECTS = ("config", "result", "dataset", "versions", "phases", "scheduler")


def shape_record(record: Mapping[str, Any]) -> tuple[Record, list[str]]:
    """The record with only what has its type, and what was left out: `attempts is 3`."""
    shaped = dict(record)
    odd: list[str] = []

    def keep(name: str, is_right: Callable[[Any], bool]) -> None:
        value = shaped.get(name)
        if value is not None and not is_right(value):
            odd.append(f"{name} is {shorten(value)}")
            del shaped[name]

    for name in _TEXTS:
        keep(name, lambda value: isinstance(value, str) and len(value) <= MAX_CHARS)
    for name in _OBJECTS:
        keep(name, lambda value: isinstance(value, dict))
    keep("exit_code", is_number)
    keep("attempts", lambda value: isinstance(value, list) and all(map(_is_object, value)))
    keep("phases", _are_phases)
    return shaped, odd


def is_number(value: Any) -> bool:
    """Whether a value is a number that can be computed with; True and False are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -MOST <= value <= MOST  # of NaN both are false


def to_number(value: Any) -> float | None:
    """The number, or None for anything else."""
    return float(value) if is_number(value) else None


def to_positive(value: Any) -> float | None:
    """The number if it is a size or a time that can be divided by, else None."""
    number = to_number(value)
    return number if number is not None and number >= LEAST else None


def to_whole(value: Any) -> int | None:
    """The whole number above 0 that a count is, or None."""
    number = to_number(value)
    ok = number is not None and 1 <= number <= 1e9 and math.floor(number) == number
    return int(value) if ok else None


def shorten(value: Any) -> str:
    """A value as a message shows it."""
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 40 else text[:39] + "…"


def check_field(is_right: bool, name: str, value: Any) -> None:
    """Raises ValueError for a field of a file that others may have edited."""
    if not is_right:
        raise ValueError(f"{name} is {shorten(value)}")


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _are_phases(value: Any) -> bool:
    """Whether each phase that is there has its seconds."""
    return all(
        phase is None or (isinstance(phase, dict) and _is_time(phase.get("mean_s")))
        for phase in (value.get(name) for name in PHASES)
    )


def _is_time(value: Any) -> bool:
    return value is None or (is_number(value) and value >= 0)
