"""Checksums of pieces and of the whole: computed, combined, and read from Digest headers."""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import zlib
from collections.abc import Callable, Iterable
from typing import Any

# Polynomials in the reflected form, for combining two checksums without the bytes.
_POLYNOMIALS = {"crc32": 0xEDB88320, "crc32c": 0x82F63B78}
_ADLER_BASE = 65521
COMBINABLE = ("crc32c", "crc32", "adler32")
HASHES = ("md5", "sha256")
HEX_DIGITS = {"crc32": 8, "crc32c": 8, "adler32": 8, "md5": 32, "sha256": 64}


def _find_crc32c() -> Callable[[Any], int] | None:
    """crc32c of a buffer through an installed wheel (hardware speed), or None."""
    try:
        import crc32c

        return crc32c.crc32c
    except ImportError:
        pass
    try:
        import google_crc32c

        return lambda data: int(google_crc32c.value(bytes(data)))
    except ImportError:
        return None


crc32c = _find_crc32c()
HAS_CRC32C = crc32c is not None


def can_compute(kind: str) -> bool:
    """Whether a digest of this kind can be checked here: crc32c needs its package."""
    return kind in HEX_DIGITS and (kind != "crc32c" or HAS_CRC32C)


def compute(kind: str, data: Any) -> int:
    """The checksum of a buffer, one of COMBINABLE."""
    if kind == "crc32":
        return zlib.crc32(data)
    if kind == "adler32":
        return zlib.adler32(data)
    if kind == "crc32c" and crc32c is not None:
        return crc32c(data)
    raise ValueError(f"{kind} cannot be computed here")


def start(kind: str) -> int:
    """The checksum of no bytes."""
    return 1 if kind == "adler32" else 0


def combine(kind: str, first: int, second: int, second_length: int) -> int:
    """The checksum of two pieces in a row, from theirs and the length of the second one."""
    if kind == "adler32":
        return _combine_adler32(first, second, second_length)
    return _multiply(zeros_matrix(kind, second_length), first) ^ second


def combine_all(kind: str, pieces: Iterable[tuple[int, int]]) -> int:
    """The checksum of all (checksum, length) pieces in a row."""
    total = start(kind)
    for value, length in pieces:
        total = combine(kind, total, value, length)
    return total


def _combine_adler32(first: int, second: int, length: int) -> int:
    a1, b1 = first & 0xFFFF, first >> 16
    a2, b2 = second & 0xFFFF, second >> 16
    a = (a1 + a2 - 1) % _ADLER_BASE
    b = (b1 + b2 + (length % _ADLER_BASE) * (a1 - 1)) % _ADLER_BASE
    return b << 16 | a


@functools.lru_cache(maxsize=256)
def zeros_matrix(kind: str, length: int) -> tuple[int, ...]:
    """The effect of `length` zero bytes on a crc register, as a 32 x 32 matrix over GF(2)."""
    one_bit = (_POLYNOMIALS[kind], *(1 << n for n in range(31)))
    matrix = one_bit
    for _ in range(3):  # one bit, doubled three times: one byte
        matrix = tuple(_multiply(matrix, column) for column in matrix)
    result = tuple(1 << n for n in range(32))
    while length:
        if length & 1:
            result = tuple(_multiply(matrix, column) for column in result)
        matrix = tuple(_multiply(matrix, column) for column in matrix)
        length >>= 1
    return result


def _multiply(matrix: tuple[int, ...], vector: int) -> int:
    total = 0
    for column in matrix:
        if vector & 1:
            total ^= column
        vector >>= 1
        if not vector:
            break
    return total


def to_hex(kind: str, value: int) -> str:
    """A checksum as the hex text that is compared and printed."""
    return f"{value:0{HEX_DIGITS[kind]}x}"


def new_hash(kind: str) -> Any:
    """A hashlib object for md5 or sha256; md5 guards against damage here, not against attackers."""
    return hashlib.md5(usedforsecurity=False) if kind == "md5" else hashlib.new(kind)


def parse_given(kind: str, text: str) -> str:
    """A digest as the user typed it, as lower-case hex; ValueError when it has another form."""
    value = text.strip().lower()
    value = value[2:] if value.startswith("0x") else value
    if len(value) != HEX_DIGITS[kind] or any(c not in "0123456789abcdef" for c in value):
        raise ValueError(f"{kind} has {HEX_DIGITS[kind]} hex digits, not {text!r}")
    return value


def parse_digest_header(value: str) -> dict[str, str]:
    """kind -> hex of a Digest header; a value that does not fit its label is left out.

    Forms seen: md5 and crc32c in base64, adler32 in hex; both forms are read for every kind, told
    apart by their length, which is unambiguous (4 bytes are 8 hex digits or 8 base64 characters
    with '==' at the end).
    """
    found = {}
    for item in value.split(","):
        label, equals, text = item.strip().partition("=")
        kind = label.strip().lower().replace("sha-256", "sha256")
        if equals and kind in HEX_DIGITS:
            try:
                found[kind] = _digest_hex(kind, text.strip())
            except ValueError:
                continue
    return found


def _digest_hex(kind: str, text: str) -> str:
    try:
        return parse_given(kind, text)
    except ValueError:
        pass
    try:
        raw = base64.b64decode(text, validate=True)
    except binascii.Error:
        raise ValueError(f"{text!r} is neither hex nor base64") from None
    if len(raw) * 2 != HEX_DIGITS[kind]:
        raise ValueError(f"{len(raw)} bytes are no {kind}")
    return raw.hex()
