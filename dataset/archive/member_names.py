"""Names of archive members: plain ones, and those that must never be written anywhere."""

from __future__ import annotations

from collections.abc import Sequence

from dataset.errors import DataError

_MAX_PART = 255  # bytes in a file name, on every filesystem of Linux
_CONTROL = bytes(range(32)) + b"\x7f"
_CONTROL_BUT_NEWLINE = _CONTROL.replace(b"\n", b"")


def are_plain_images(paths: Sequence[bytes]) -> bool:
    """Whether every path is the bare name of an image as the real class tars hold it."""
    blob = b"\n" + b"\n".join(paths) + b"\n"
    return blob.count(b".JPEG\n") == len(paths) > 0 and b"/" not in blob and b"\n." not in blob


def file_name(path: bytes) -> bytes:
    """The last part of a path."""
    return path.rpartition(b"/")[2]


def check_names(paths: Sequence[bytes], what: str) -> None:
    """Refuses a list of members when one of them could be written outside its folder.

    A quick check of all names together decides whether each name must be checked.
    """
    blob = b"\n".join(paths)
    if (
        b".." in blob
        or b"\n/" in blob
        or blob.startswith(b"/")
        or blob.count(b"\n") != max(0, len(paths) - 1)
        or len(blob.translate(None, _CONTROL_BUT_NEWLINE)) != len(blob)
        or max(map(len, paths), default=0) > _MAX_PART
    ):
        for path in paths:
            split_path(path, what)


def split_path(path: bytes, what: str) -> list[bytes]:
    """The parts of a member's path, "." left out; a path that could do harm is refused."""
    parts = [part for part in path.split(b"/") if part not in (b"", b".")]
    if path.startswith(b"/") or b".." in parts or not parts:
        raise DataError(f"{what}: the member {show(path)} would be written outside its folder")
    if len(path.translate(None, _CONTROL)) != len(path):
        raise DataError(f"{what}: the member {show(path)} has a control character in its name")
    if max(map(len, parts)) > _MAX_PART:
        raise DataError(f"{what}: {show(path)} has a part of more than {_MAX_PART} bytes")
    return parts


def show(name: bytes) -> str:
    """A name for a message, with control characters and stray bytes made visible."""
    return ascii(name.decode("utf-8", "surrogateescape")[:300])
