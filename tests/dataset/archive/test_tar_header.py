"""The extensions of a tar's entries: their cost grows with their size, and has a bound."""

from __future__ import annotations

from typing import Any

import pytest

from dataset.archive.tar_header import parse_pax, read_entry
from dataset.errors import DataError
from tests.dataset.tars import END, header, pad


class CountedBytes(bytes):
    """Counts the bytes that are copied out of it and its copies."""

    num_copied = 0

    def __getitem__(self, key: Any) -> Any:
        return self._count(super().__getitem__(key))

    def strip(self, *args: Any) -> bytes:
        return self._count(super().strip(*args))

    def rstrip(self, *args: Any) -> bytes:
        return self._count(super().rstrip(*args))

    def partition(self, *args: Any) -> Any:
        return tuple(self._count(part) for part in super().partition(*args))

    def _count(self, data: bytes) -> CountedBytes:
        CountedBytes.num_copied += len(data)
        return CountedBytes(data)


def test_a_pax_header_of_many_records_is_read_once() -> None:
    text = CountedBytes(b"10 a=bcde\n" * 2_000 + bytes(480))
    CountedBytes.num_copied = 0
    assert parse_pax(text, 0, "x.tar") == {b"a": b"bcde"}
    assert CountedBytes.num_copied <= 4 * len(text)


@pytest.mark.parametrize(
    "text",
    [
        *(b"6 a=b\nx", b"5 a=b\n", b"7 a=b\n", b"0 a=b\n", b"4 a=\n", b"12345678 a=b\n", b"a=b\n"),
        *(b"6 abc\n", b" a=b\n", b"-6 a=b\n", b"2 a=b\n", b"\x006 a=b\n", b"\xb26 a=b\n"),
    ],
)
def test_a_broken_pax_record_is_refused(text: bytes) -> None:
    with pytest.raises(DataError, match="broken pax"):
        parse_pax(text, 0, "x.tar")


def test_pax_values_may_hold_anything() -> None:
    text = b"15 path=a b=c\n\n" + b"6 k=v\n" + bytes(100)
    assert parse_pax(text, 0, "x.tar") == {b"path": b"a b=c\n", b"k": b"v"}


@pytest.mark.parametrize("kind", [b"L", b"K", b"x", b"g"])
@pytest.mark.parametrize("length", [0, 512])
def test_name_records_in_a_row_have_a_bound(kind: bytes, length: int) -> None:
    body = b"512 a=" + b"b" * 505 + b"\n" if kind in b"xg" else b"b" * 512
    record = header(b"n", length, kind, b"ustar\x0000") + pad(body[:length])
    tar = record * (2 * 1024 * 1024 // len(record)) + header(b"a", 1) + pad(b"x") + END
    reads: list[int] = []

    def pread(num: int, offset: int) -> bytes:
        reads.append(num)
        return tar[offset : offset + num]

    with pytest.raises(DataError, match="name records"):
        read_entry(pread, 0, len(tar), "x.tar")
    assert sum(reads) <= (1 << 20) + 512
