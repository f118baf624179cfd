"""Archives with one thing wrong each; every one of them must be refused, by name."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable

from tests.dataset.tars import END, flatten, header, make_tree, nested_bytes, pad, tar_bytes

GOOD = nested_bytes(make_tree())
FIRST_INNER = 512  # where the first class tar starts in GOOD


def _flip(data: bytes, position: int, bit: int = 1) -> bytes:
    changed = bytearray(data)
    changed[position] ^= bit
    return bytes(changed)


def _special(kind: bytes, **fields: object) -> bytes:
    """A train tree with a member that is no plain file."""
    buffer = io.BytesIO(tar_bytes(flatten(make_tree(1))))
    with tarfile.open(fileobj=buffer, mode="a") as tar:
        info = tarfile.TarInfo("n01440764/odd.JPEG")
        info.type = kind
        for name, value in fields.items():
            setattr(info, name, value)
        tar.addfile(info)
    return buffer.getvalue()


def _pax_path(path: bytes) -> bytes:
    """A file whose pax header gives it a name that no plain header could have."""
    body = b" path=" + path + b"\n"
    length = len(body) + 2
    record = b"%d" % (length + (length >= 100)) + body
    return (
        header(b"pax", len(record), b"x", b"ustar\x0000") + pad(record)
        + header(b"n01440764/a.JPEG", 1, b"0", b"ustar\x0000") + pad(b"x") + END
    )  # fmt: skip


def _class_tar(inner: bytes) -> bytes:
    """A good class tar and then this one."""
    return tar_bytes({"n01440764.tar": tar_bytes({"a.JPEG": b"a"}), "n02.tar": inner})


def _in_tree(name: str, data: bytes = b"x") -> bytes:
    return tar_bytes(flatten(make_tree(1)) | {name: data})


def _in_class(name: str, data: bytes = b"x") -> bytes:
    return _class_tar(tar_bytes({"b.JPEG": b"b", name: data}))


def _twice(nested: bool) -> bytes:
    one = tar_bytes({"a.JPEG": b"1"})[:1024]
    both = one + tar_bytes({"a.JPEG": b"2"})
    if nested:
        return _class_tar(both)
    return tar_bytes({"n01/a.JPEG": b"1"})[:1024] + tar_bytes({"n01/a.JPEG": b"2"})


def _sparse_pax() -> bytes:
    record = b"22 GNU.sparse.major=1\n"
    return (
        header(b"pax", len(record), b"x", b"ustar\x0000") + pad(record)
        + header(b"n01440764/a.JPEG", 1, b"0", b"ustar\x0000") + pad(b"x") + END
    )  # fmt: skip


# name -> (bytes of the archive, what the message must say)
BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "truncated in the middle": (lambda: GOOD[: len(GOOD) // 2 + 100], "truncated"),
    "truncated at a member's end": (lambda: tar_bytes(flatten(make_tree(1)))[:1024], "truncated"),
    "truncated in the end marker": (lambda: GOOD.rstrip(b"\0") + bytes(600), "truncated"),
    "truncated class tar": (
        lambda: _class_tar(tar_bytes({"a.JPEG": b"x" * 3000})[:2048]),
        "truncated",
    ),
    "flipped size digit in the outer header": (lambda: _flip(GOOD, 125), "wrong checksum"),
    "flipped name in an inner header": (lambda: _flip(GOOD, FIRST_INNER + 3), "wrong checksum"),
    "flipped size in an inner header": (lambda: _flip(GOOD, FIRST_INNER + 134), "wrong checksum"),
    "flipped checksum field": (lambda: _flip(GOOD, FIRST_INNER + 150), "wrong checksum"),
    "flipped type": (lambda: _flip(GOOD, FIRST_INNER + 156), "wrong checksum"),
    "zeroed header in the middle": (
        lambda: GOOD[: FIRST_INNER + 1024] + bytes(512) + GOOD[FIRST_INNER + 1536 :],
        "end-of-archive marker",
    ),
    "tars one after the other": (lambda: GOOD + GOOD, "end-of-archive marker"),
    "parent folder": (lambda: _in_tree("../escape.JPEG"), "outside"),
    "parent folder, no image": (lambda: _in_tree("../escape"), "outside"),
    "parent folder inside": (lambda: _in_tree("n01440764/../../escape.JPEG"), "outside"),
    "parent folder in a class tar": (lambda: _in_class("../escape.JPEG"), "outside"),
    "absolute": (lambda: _in_tree("/etc/escape.JPEG"), "outside"),
    "absolute in a class tar": (lambda: _in_class("/etc/escape.JPEG"), "outside"),
    "class tar that is no class": (
        lambda: tar_bytes({"...tar": tar_bytes({"a.JPEG": b"a"})}),
        "names no class",
    ),
    "newline": (lambda: _in_tree("n01440764/a\nb.JPEG"), "control character"),
    "newline in a class tar": (lambda: _in_class("a\nb.JPEG"), "control character"),
    "escape sequence": (lambda: _in_class("\x1b[2J.JPEG"), "control character"),
    "NUL": (lambda: _pax_path(b"n01440764/a\0b.JPEG"), "control character"),
    "too long a name": (lambda: _in_class("x" * 300 + ".JPEG"), "more than 255 bytes"),
    "symbolic link": (lambda: _special(tarfile.SYMTYPE, linkname="/etc"), "symbolic link"),
    "hard link": (lambda: _special(tarfile.LNKTYPE, linkname="n01440764"), "hard link"),
    "character device": (lambda: _special(tarfile.CHRTYPE), "character device"),
    "block device": (lambda: _special(tarfile.BLKTYPE), "block device"),
    "FIFO": (lambda: _special(tarfile.FIFOTYPE), "FIFO"),
    "GNU sparse file": (lambda: _special(tarfile.GNUTYPE_SPARSE), "sparse"),
    "pax sparse file": (_sparse_pax, "sparse"),
    "unknown type": (lambda: _special(b"Z"), "unknown type"),
    "two of one name": (lambda: _twice(nested=False), "two members"),
    "two of one name in a class tar": (lambda: _twice(nested=True), "two members"),
    "two tars of one class": (
        lambda: tar_bytes({"n01.tar": tar_bytes({"a.JPEG": b"a"}), "./n01.tar": b""}),
        "two class tars",
    ),
    "class tars and images": (
        lambda: tar_bytes({"n01.tar": tar_bytes({"a.JPEG": b"a"}), "b.JPEG": b"b"}),
        "mixes",
    ),
    "empty tar": (lambda: bytes(10240), "no files"),
    "empty file": (lambda: b"", "empty"),
    "class tar without files": (lambda: _class_tar(tar_bytes({})), "no image"),
    "class tar without images": (lambda: _class_tar(tar_bytes({"notes.txt": b"x"})), "no image"),
    "empty class tar": (lambda: _class_tar(b""), "truncated"),
    "0-byte image": (lambda: _in_tree("n01440764/zero.JPEG", b""), "empty"),
    "0-byte image in a class tar": (lambda: _in_class("zero.JPEG", b""), "empty"),
    "really gzip": (lambda: gzip.compress(GOOD), "gzip"),
    "no archive": (lambda: b"<html>403 Forbidden</html>\n" * 100, "not a tar"),
    "random bytes": (lambda: bytes(range(1, 256)) * 40, "not a tar"),
    "train images without classes": (lambda: tar_bytes({"a.JPEG": b"a"}), "no class folder"),
    "folder inside a class tar": (lambda: _in_class("sub/a.JPEG"), "folder of its own"),
    "huge name record": (
        lambda: header(b"././@LongLink", 1 << 30, b"L") + END,
        "name record",
    ),
    "broken pax record": (
        lambda: header(b"pax", 12, b"x") + pad(b"99 path=abc\n") + header(b"a", 1) + END,
        "broken pax",
    ),
    "negative size": (lambda: header(b"n01/a.JPEG", b"-0000000001\0") + END, "size"),
    "negative base-256 size": (lambda: header(b"n01/a.JPEG", b"\xff" * 12) + END, "size"),
    "absurd base-256 size": (
        lambda: header(b"n01/a.JPEG", b"\x80" + b"\x7f" * 11) + END,
        "truncated",
    ),
}  # fmt: skip
