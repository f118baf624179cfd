"""Checksums of pieces combine to those of the whole; Digest headers are read with suspicion."""

from __future__ import annotations

import base64
import hashlib
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataset import checksum

CHECK = b"123456789"  # the usual test string of checksum tables
KNOWN = {"crc32": 0xCBF43926, "crc32c": 0xE3069283, "adler32": 0x091E01DE}


@pytest.mark.parametrize("kind", checksum.COMBINABLE)
def test_known_values(kind: str) -> None:
    assert checksum.compute(kind, CHECK) == KNOWN[kind]


@pytest.mark.parametrize("kind", checksum.COMBINABLE)
@given(pieces=st.lists(st.binary(max_size=300), max_size=6))
def test_pieces_combine_to_the_whole(kind: str, pieces: list[bytes]) -> None:
    whole = checksum.compute(kind, b"".join(pieces))
    parts = [(checksum.compute(kind, piece), len(piece)) for piece in pieces]
    assert checksum.combine_all(kind, parts) == whole


@pytest.mark.parametrize("kind", checksum.COMBINABLE)
def test_long_pieces_combine(kind: str) -> None:
    first, second = b"a" * 1_000_003, b"b" * (1 << 20)
    parts = [(checksum.compute(kind, first), len(first)), (checksum.compute(kind, second), 1 << 20)]
    assert checksum.combine_all(kind, parts) == checksum.compute(kind, first + second)


def test_a_buffer_that_is_reused_is_summed_without_a_copy_of_it() -> None:
    view = memoryview(bytearray(CHECK + b"rest"))[: len(CHECK)]
    assert [checksum.compute(kind, view) for kind in KNOWN] == list(KNOWN.values())


def test_the_forms_of_digest_that_servers_send() -> None:
    md5 = hashlib.md5(CHECK)
    crc = KNOWN["crc32c"].to_bytes(4, "big")
    header = (
        f"md5={base64.b64encode(md5.digest()).decode()},crc32c={base64.b64encode(crc).decode()}, "
        f"adler32={KNOWN['adler32']:08x}, SHA-256={hashlib.sha256(CHECK).hexdigest()}, unixsum=1"
    )
    assert checksum.parse_digest_header(header) == {
        "md5": md5.hexdigest(),
        "crc32c": "e3069283",
        "adler32": "091e01de",
        "sha256": hashlib.sha256(CHECK).hexdigest(),
    }


@pytest.mark.parametrize(
    "header",
    [
        f"md5={zlib.adler32(CHECK):08x}",  # an adler32 under another label
        f"crc32c={base64.b64encode(hashlib.md5(CHECK).digest()).decode()}",
        "md5=not base64!",
        "md5=",
        "md5",
        "",
    ],
)
def test_a_mislabelled_digest_is_refused(header: str) -> None:
    assert checksum.parse_digest_header(header) == {}


def test_a_digest_as_typed_is_checked() -> None:
    assert checksum.parse_given("crc32", " 0xCBF43926 ") == "cbf43926"
    with pytest.raises(ValueError, match="32 hex digits"):
        checksum.parse_given("md5", "cbf43926")
