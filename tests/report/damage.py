"""Damages records and event logs at random, by a seed: what a report must survive."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from typing import Any

DEEP = 100_000
# Values that have broken readers: wrong types, numbers without end, nesting, odd text.
ODD_VALUES: list[Any] = [
    None, True, 0, -1, 3, 1e308, 1e-308, -0.0, 10**400, float("inf"), float("-inf"), float("nan"),
    "", "x", "\ud800", "\x00", "$\\frac{$", "1+" * 50, "y" * 5000, [], [[]], [1, "a", None], {},
    {"": {}}, {"mean_s": "soon"}, "nowhere/at all", 2**63, 1e15, 1e-6,
]  # fmt: skip
ODD_TEXTS = [
    b"", b"{", b"[" * DEEP, b'{"a":' * DEEP, b"null", b"3", b"\xff\xfe\x00", b"9" * 5000,
    b'"\\ud800"', b'{"schema": 1}', b"NaN", b"[1e999]", b"\n" * 50,
]  # fmt: skip
ODD_BYTES = [
    b"...\n", b"...", b"\n", b"\x00", b"\xff", b"9" * 5000, b"-", b"(", b"2026-13-01", b"02/29",
    b"99:99:99", b"9999-12-31", b"0001-01-01", b"\tX = " + b"1+" * DEEP + b"1\n",
    b"\tCode 99999999999 Subcode x\n", b"(return value 99999999999999)", b"040 (1.0.0) ",
    b"Finished transferring input files\n", b"\tGLIDEIN_ResourceName = {{{{\n",
]  # fmt: skip


def damage_json(record: Any, chance: random.Random) -> bytes:
    """The record with one to three values changed, removed or doubled, or no record."""
    if chance.random() < 0.15:
        return chance.choice(ODD_TEXTS)
    copy = json.loads(json.dumps(record))
    for _ in range(chance.randint(1, 3)):
        parent, key = _choose_place(copy, chance)
        if parent is None:
            break
        if chance.random() < 0.15:
            del parent[key]
        else:
            parent[key] = deepcopy(chance.choice(ODD_VALUES))  # it may be damaged in its turn
    return json.dumps(copy).encode()


def _choose_place(value: Any, chance: random.Random) -> tuple[Any, Any]:
    """A random parent and key: half of the time at the top, else further down."""
    parent, key = None, None
    while isinstance(value, dict | list) and value:
        parent = value
        key = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
        value = value[key]
        if chance.random() < 0.5:
            break
    return parent, key


def damage_lines(text: bytes, chance: random.Random) -> bytes:
    """A .jsonl with lines damaged, torn, doubled or out of order."""
    lines = text.splitlines()
    for _ in range(chance.randint(1, 3)):
        index = chance.randrange(len(lines))
        way = chance.randrange(4)
        if way == 0:
            lines[index] = damage_json(json.loads(text.splitlines()[0]), chance)
        elif way == 1:
            lines[index] = lines[index][: chance.randrange(len(lines[index]) + 1)]
        elif way == 2:
            lines.insert(index, chance.choice(lines))
        else:
            lines[index] = chance.choice(ODD_TEXTS)
    return b"\n".join(lines)


def damage_bytes(text: bytes, chance: random.Random) -> bytes:
    """A text with bytes flipped, cut out, doubled, or replaced by something odd."""
    body = bytearray(text)
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(len(body) + 1)
        end = min(len(body), at + chance.choice((1, 5, 50, 500)))
        way = chance.randrange(5)
        if way == 0 and at < len(body):
            body[at] = chance.randrange(256)
        elif way == 1:
            del body[at:end]
        elif way == 2:
            body[at:at] = body[at:end]
        else:
            body[at : at if way == 3 else end] = chance.choice(ODD_BYTES)
    return bytes(body)
