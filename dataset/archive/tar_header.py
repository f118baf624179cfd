"""One entry of a tar, read with care: v7, ustar, GNU and pax, its checksum verified."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dataset.archive.member_names import show
from dataset.errors import DataError

BLOCK = 512
ENDLESS = 1 << 62  # the end of a stream whose length is not known
_ZERO_BLOCK = bytes(BLOCK)
_MAX_EXTENSION = 1 << 20  # long names and pax records of one file beyond 1 MiB are damage
_MAX_DIGITS = 7  # of a pax record's length
_MAX_PADDING = 16 << 20  # tar pads to its record size: 10 KiB by default, 1 MiB with -b 2048
_REFUSED = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"6": "a FIFO",
    b"S": "a sparse file",
    b"M": "a piece of a multi-volume archive",
    b"D": "a GNU dump directory",
}

Pread = Callable[[int, int], bytes]  # (number of bytes, offset) -> bytes, fewer at the end


@dataclass(frozen=True)
class Entry:
    """A regular file inside a tar: its path as stored, and where its bytes are."""

    name: bytes
    offset: int
    size: int
    end: int  # where the next header starts


def iter_tar(pread: Pread, start: int, end: int, what: str) -> Iterator[Entry]:
    """Each file of the tar in turn; positions only grow, so pread may be a stream."""
    position = start
    while (entry := read_entry(pread, position, end, what)) is not None:
        if entry.name:
            yield entry
        position = entry.end


def check_header(header: bytes, position: int, what: str) -> None:
    """Raises DataError unless the header's checksum is right, in either historic way of summing."""
    field = header[148:156].strip(b" \0")
    unsigned = sum(header) - sum(header[148:156]) + 8 * 32
    signed = unsigned - 256 * sum(byte > 127 for byte in header[:148] + header[156:])
    if not field or field.strip(b"01234567") or int(field, 8) not in (unsigned, signed):
        raise DataError(
            f"{what}: the header at byte {position} has a wrong checksum ({field[:8]!r}, "
            f"computed {unsigned:o}); the archive is damaged or not a tar: fetch it again"
        )


def read_entry(pread: Pread, position: int, end: int, what: str) -> Entry | None:
    """The entry at a position with its GNU and pax extensions; None at the end of the archive.

    A folder or a volume label gives an entry without a name.
    """
    name: bytes | None = None
    size: int | None = None
    first = position
    while True:
        header = _read_header(pread, position, end, what)
        if header == _ZERO_BLOCK:
            if name is not None or size is not None:
                raise DataError(f"{what}: ends after a name record at byte {position}")
            _check_padding(pread, position, end, what)
            return None
        check_header(header, position, what)
        kind = header[156:157]
        data = position + BLOCK
        if kind in (b"L", b"K", b"x", b"g"):
            length = parse_number(header[124:136], position, what)
            if data + length - first > _MAX_EXTENSION:
                raise DataError(
                    f"{what}: name records of {data + length - first} bytes at byte {first}, "
                    f"more than {_MAX_EXTENSION}; the archive is damaged"
                )
            text = _read_extension(pread, data, length, end, what)
            if kind == b"L":
                name = text.split(b"\0", 1)[0]
            elif kind == b"x":
                records = parse_pax(text, position, what)
                name = records.get(b"path", name)
                size = _pax_size(records, size, position, what)
            elif kind == b"g" and {b"path", b"size"} & parse_pax(text, position, what).keys():
                raise DataError(f"{what}: a global pax header at byte {position} sets path or size")
            position = data + round_up(length)
            continue
        stored_size = parse_number(header[124:136], position, what)
        name = stored_name(header) if name is None else name
        return _finish_entry(kind, name, stored_size if size is None else size, data, end, what)


def _finish_entry(kind: bytes, name: bytes, size: int, data: int, end: int, what: str) -> Entry:
    shown = show(name)
    if kind in (b"5", b"V") or (kind in b"0\0" and name.endswith(b"/")):
        return Entry(b"", data, 0, data)
    if kind not in (b"0", b"7", b"\0"):
        refused = _REFUSED.get(kind, f"of the unknown type {kind!r}")
        raise DataError(f"{what}: {shown} is {refused}; only plain files are read from an archive")
    if not name:
        raise DataError(f"{what}: the entry at byte {data - BLOCK} has an empty name")
    if data + size > end:
        raise DataError(
            f"{what}: truncated: {shown} needs bytes up to {data + size}, "
            f"the archive ends at {end}; fetch it again"
        )
    return Entry(name, data, size, data + round_up(size))


def _read_header(pread: Pread, position: int, end: int, what: str) -> bytes:
    header = pread(BLOCK, position) if position + BLOCK <= end else b""
    if len(header) < BLOCK:
        raise DataError(
            f"{what}: truncated: no end-of-archive marker before byte {end}; fetch it again"
        )
    return header


def _check_padding(pread: Pread, marker: int, end: int, what: str) -> None:
    """Refuses data after the end marker: zeros in a damaged file look like an end."""
    position, chunk = marker + BLOCK, b"\0"
    while position < end and position - marker <= _MAX_PADDING:
        chunk = pread(min(1 << 20, end - position), position)
        if chunk.count(0) != len(chunk) or not chunk:
            break
        position += len(chunk)
    at_end = position == end or (end == ENDLESS and not chunk)
    if at_end and position - marker < 2 * BLOCK:
        raise DataError(f"{what}: truncated: half of the end-of-archive marker is missing")
    if not at_end:
        raise DataError(
            f"{what}: an end-of-archive marker at byte {marker}, but more follows it; "
            "a damaged or a concatenated tar: fetch it again"
        )


def _read_extension(pread: Pread, position: int, length: int, end: int, what: str) -> bytes:
    text = pread(length, position) if position + length <= end else b""
    if len(text) < length:
        raise DataError(f"{what}: truncated inside a name record at byte {position - BLOCK}")
    return text


def parse_pax(text: bytes, position: int, what: str) -> dict[bytes, bytes]:
    """The keywords of a pax extended header: records of the form "LENGTH KEY=VALUE newline"."""
    records: dict[bytes, bytes] = {}
    start, end = 0, len(text.rstrip(b"\0"))
    while start < end:  # by position: a copy of the rest for each record takes quadratic time
        space = text.find(b" ", start, start + _MAX_DIGITS + 1)
        digits = text[start : max(start, space)]
        stop = start + (int(digits) if digits.isdigit() else 0)
        equals = text.find(b"=", space, stop)
        if space < 0 or equals < 0 or text[stop - 1 : stop] != b"\n":
            raise DataError(f"{what}: a broken pax header at byte {position}; fetch it again")
        records[text[space + 1 : equals]] = text[equals + 1 : stop - 1]
        start = stop
    if any(key.startswith(b"GNU.sparse") for key in records):
        raise DataError(f"{what}: a sparse file at byte {position}; only plain files are read")
    return records


def _pax_size(
    records: dict[bytes, bytes], size: int | None, position: int, what: str
) -> int | None:
    value = records.get(b"size")
    if value is None:
        return size
    if not value.isdigit() or len(value) > 18:
        raise DataError(f"{what}: the pax header at byte {position} has the size {value[:20]!r}")
    return int(value)


def parse_number(field: bytes, position: int, what: str) -> int:
    """A header's number: octal digits, or base 256 when the first bit is set."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    text = field.split(b"\0", 1)[0].strip(b" ")
    if field[0] > 0x80 or text.strip(b"01234567"):
        raise DataError(f"{what}: the header at byte {position} has the size {field!r}")
    return int(text or b"0", 8)


def stored_name(header: bytes) -> bytes:
    """The path in a header itself; of a long one, a record before the header has it."""
    name = header[:100].split(b"\0", 1)[0]
    if header[257:263] == b"ustar\0":  # GNU's magic ends in a space, and has no prefix
        prefix = header[345:500].split(b"\0", 1)[0]
        if prefix:
            return prefix + b"/" + name
    return name


def round_up(size: int) -> int:
    """The bytes that a file of a size takes in a tar, without its header."""
    return (size + BLOCK - 1) & -BLOCK
