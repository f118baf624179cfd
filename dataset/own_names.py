"""The names of the files that a fetch keeps beside the objects; no object may have them."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from dataset.errors import UserError

RECORD = "fetched.jsonl"
LOCK = ".fetch.lock"
STAGES = "stages.jsonl"  # what each command used, a line a stage
STREAM = ".stream.json"  # where the readers of a stream into this folder meet
PART = ".trainyard-part"  # x.bin.part may be an object, or a file of the user
JOURNAL = ".journal"
NEW, DOUBTED = ".new", ".doubted"
UNITS = ".units"  # the folder of a bounded cache
UNIT_FILE = re.compile(r"\d{7,}(?:\.part)?")  # a file in it (dataset/stream/unit_map.py)
MAX_NAME_BYTES = 200  # of a name that gets our endings: file systems take 255
_OWN = re.compile(rf".*{re.escape(PART)}(?:{UNITS}|{JOURNAL}(?:{NEW}|{DOUBTED})?)?", re.IGNORECASE)


def part_path(path: Path) -> Path:
    """Where the bytes of an object lie until it is whole."""
    name = path.name
    if len(os.fsencode(name)) > MAX_NAME_BYTES:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return path.with_name(name + PART)


def journal_path(path: Path) -> Path:
    part = part_path(path)
    return part.with_name(part.name + JOURNAL)


def units_path(path: Path) -> Path:
    """The folder of the units of a tar, of which a part is here at a time."""
    part = part_path(path)
    return part.with_name(part.name + UNITS)


def list_units(path: Path) -> list[Path]:
    """The files of units that a stream of a tar has left."""
    folder = units_path(path)
    if not folder.is_dir() or folder.is_symlink():
        return []
    return [file for file in folder.iterdir() if UNIT_FILE.fullmatch(file.name)]


def doubted_path(journal: Path) -> Path:
    """What a journal is called once the disk failed: see Journal.doubt."""
    return journal.with_name(journal.name + DOUBTED)


def older_path(path: Path, new: Path) -> Path:
    """The name that an earlier version gave to a file of an object's unfinished transfer."""
    return path.with_name(path.name + ".part" + new.name.partition(PART)[2])


def check_distinct(objects: Iterable[tuple[str, str, str]]) -> None:
    """Raises when two objects (name, identity, URL) have the same name, before any is fetched.

    Two URLs that differ only in a token may be two objects; the second would be lost.
    """
    places: dict[str, tuple[str, str]] = {}
    for name, identity, url in objects:
        other = places.setdefault(name, (identity, url))
        if other != (identity, url):
            raise UserError(
                f"{identity} and {other[0]} have the same name; fetch them into two folders (--out)"
            )


def check_names(paths: Iterable[Path], root: Path, others: Iterable[Path] = ()) -> None:
    """Raises if an object's path is that of a file of ours: a record in `root`, or in `others`."""
    place = root.resolve()
    taken = _check_apart([other.resolve() for other in others], place)
    taken = {other.relative_to(place) for other in taken if place in other.parents}
    for path in paths:
        relative = path.relative_to(root)
        if relative in taken:
            raise UserError(
                f"{path} is where this command writes its own record; choose another folder for "
                "that (--record, --summary) or for the object (--out)"
            )
        top = relative.parts[0]
        if top.lower() in (RECORD, LOCK, STAGES, STREAM):
            raise UserError(
                f"no object can be written to {root / top}: our own record has that name. Rename "
                "the object, or fetch the folder that it is in: that gets a folder of its own"
            )
        check_no_part(relative)


def _check_apart(others: Sequence[Path], place: Path) -> set[Path]:
    """The command's own files; raises when two are the same, or one is a record."""
    for number, path in enumerate(others):
        is_ours = path in (place / RECORD, place / LOCK) or _OWN.fullmatch(path.name)
        if is_ours or path in others[:number]:
            raise UserError(f"{path} is a record of this command already; choose another --summary")
    return set(others)


def check_no_part(path: Path) -> None:
    """Raises when an object has the name of an unfinished transfer of another one."""
    own = next((part for part in path.parts if _OWN.fullmatch(part)), None)
    if own is not None:
        raise UserError(
            f"{path}: {own} is the name of an unfinished transfer and cannot be that of an object; "
            "rename it at its source"
        )
