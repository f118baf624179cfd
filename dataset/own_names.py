"""The files that a fetch keeps beside the objects, by names that no object may have."""

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
PART = ".trainyard-part"  # x.bin.part may be an object, or a file of the user
JOURNAL = ".journal"
NEW, DOUBTED = ".new", ".doubted"
MAX_NAME_BYTES = 200  # of a name that gets our endings: file systems take 255
_OWN = re.compile(rf".*{re.escape(PART)}(?:{JOURNAL}(?:{NEW}|{DOUBTED})?)?", re.IGNORECASE)


def part_path(path: Path) -> Path:
    """Where the bytes of an object lie until it is whole."""
    name = path.name
    if len(os.fsencode(name)) > MAX_NAME_BYTES:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return path.with_name(name + PART)


def journal_path(path: Path) -> Path:
    part = part_path(path)
    return part.with_name(part.name + JOURNAL)


def doubted_path(journal: Path) -> Path:
    """What a journal is called once the disk failed: see Journal.doubt."""
    return journal.with_name(journal.name + DOUBTED)


def older_path(path: Path, new: Path) -> Path:
    """How an earlier version called a file of the unfinished transfer of an object."""
    return path.with_name(path.name + ".part" + new.name.partition(PART)[2])


def check_distinct(objects: Iterable[tuple[str, str, str]]) -> None:
    """Raises when two objects (name, identity, URL) have one name, before the first is fetched.

    Two URLs that differ in a token alone may be two objects, of which the second would be lost.
    """
    places: dict[str, tuple[str, str]] = {}
    for name, identity, url in objects:
        other = places.setdefault(name, (identity, url))
        if other != (identity, url):
            raise UserError(
                f"{identity} and {other[0]} have one name; fetch them into two folders (--out)"
            )


def check_names(paths: Iterable[Path], root: Path, others: Iterable[Path] = ()) -> None:
    """Raises unless objects can lie at these paths: `root` holds our records, `others` are ours."""
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
        if top.lower() in (RECORD, LOCK, STAGES):
            raise UserError(
                f"no object can get the name {root / top}: our own record has it. Rename the "
                "object, or fetch the folder that it is in, which gets a folder of its own"
            )
        check_no_part(relative)


def _check_apart(others: Sequence[Path], place: Path) -> set[Path]:
    """The files that the command writes; raises when two are one, or one is a record of ours."""
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
