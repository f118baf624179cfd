"""Numbers and JSON of strangers: taken within bounds, else a ValueError and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from dataset.untrusted import MAX_COUNT, MAX_JSON_DEPTH, check_count, parse_count, parse_json

NO_COUNTS = ["", " 1", "+1", "-3", "1_0", "0x10", "²", "１", "1.0", "9" * 5000, str(MAX_COUNT + 1)]


@pytest.mark.parametrize("text", NO_COUNTS)
def test_only_plain_ascii_digits_are_a_count(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_count(text)
    assert len(str(caught.value)) < 120


def test_a_count_is_bounded_where_its_reader_says_so() -> None:
    assert parse_count("007") == 7
    assert parse_count(str(MAX_COUNT)) == MAX_COUNT
    assert parse_count("5", largest=5) == 5
    with pytest.raises(ValueError):
        parse_count("6", largest=5)


@pytest.mark.parametrize("value", [True, -1, 1.0, "1", None, [1], MAX_COUNT + 1])
def test_only_an_integer_is_a_count_in_json(value: Any) -> None:
    with pytest.raises(ValueError):
        check_count(value)


BAD_JSON = {
    "open arrays": b"[" * 100_000,
    "deep arrays": b"[" * 900 + b"]" * 900,
    "deep objects": b'{"a":' * 900 + b"1" + b"}" * 900,
    "a string without an end": b'["' + b'\\"[' * 300_000,
    "a long integer": b"[" + b"9" * 5000 + b"]",
    "a large float": b"[1e400]",
    "infinity": b"[Infinity]",
    "not a number": b"NaN",
    "no text": b'"\xff"',
    "too long": b" " * (1 << 20) + b"1",
    "nothing": b"",
}


@pytest.mark.parametrize("name", BAD_JSON)
def test_hostile_json_is_refused_at_once(name: str) -> None:
    with pytest.raises(ValueError):
        parse_json(BAD_JSON[name])


def test_ordinary_json_is_read() -> None:
    assert parse_json('{"a": [1, -2, 2.5, null, "é]]"]}') == {"a": [1, -2, 2.5, None, "é]]"]}
    assert parse_json(b'["' + b"[" * 1000 + b'"]') == ["[" * 1000]
    deepest: Any = parse_json(b"[" * MAX_JSON_DEPTH + b"]" * MAX_JSON_DEPTH)
    assert deepest == [deepest[0]]
    assert parse_json(b"[" + b"[]," * 100 + b"0]")[-1] == 0
