"""The classes of validation images: the built-in table, valprep.sh or LOC_val_solution.csv."""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dataset.archive.member_names import show
from dataset.errors import DataError, UserError
from dataset.names import SOLUTION, VALPREP
from dataset.words import count

NUM_VAL = 50_000
BUILTIN = "the built-in ILSVRC2012 table"
_TABLE = Path(__file__).with_name("ilsvrc2012_val_labels.bin")
_NAME = "ILSVRC2012_val_{:08d}.JPEG"
_MOVE = re.compile(
    r"""mv\s+(?:-\w+\s+)*["']?(?:\./)?([^\s"'/]+)["']?\s+["']?(?:\./)?([^\s"'/]+)/?["']?"""
)
_SOLUTION_HEADER = "ImageId,"


def label_val(
    names: Sequence[bytes],
    archive: Path,
    labels: Path | None = None,
    inside: tuple[str, str] | None = None,
    problems: list[str] | None = None,
) -> list[bytes]:
    """The class of each validation image, by its file name.

    From `labels`, else from a valprep.sh or LOC_val_solution.csv beside the archive or inside it
    (name, text), else from the built-in table, when the archive holds exactly the 50,000 names of
    the real set. With `problems` what does not match is noted there, and such an image gets b"".
    """
    table = label_table(archive, labels, inside)
    if table is None and is_real_val(names):
        table = builtin_labels(), BUILTIN
    if table is not None:
        return match_labels(names, *table, problems)
    raise unknown_labels(archive, names)


def label_table(
    archive: Path, labels: Path | None = None, inside: tuple[str, str] | None = None
) -> tuple[dict[bytes, bytes], str] | None:
    """The labels in a file, given, beside the archive or inside it, and their source."""
    source = labels or find_labels(archive.parent)
    if source is not None:
        return read_labels(source), str(source)
    if inside is not None:
        name = f"{archive}: {inside[0]}"
        return parse_labels(inside[1], name), name
    return None


def unknown_labels(archive: Path, names: Sequence[bytes]) -> UserError:
    """The error of a flat archive that is not the real set and has no label file."""
    return UserError(
        f"{archive} is flat and not the ILSVRC2012 validation set ({len(names)} images, first "
        f"{show(min(names))}), so its labels are unknown; put {VALPREP} or {SOLUTION} beside it, "
        "or name one: scripts/index_tar.py --labels FILE to train from the tar, "
        "scripts/extract_ILSVRC_mp.py --valprep_script FILE to extract it"
    )


def find_labels(folder: Path) -> Path | None:
    """The label file in a folder, if there is one."""
    for name in (VALPREP, SOLUTION):
        if (folder / name).is_file():
            return folder / name
    return None


def is_real_val(names: Sequence[bytes]) -> bool:
    """Whether the names are exactly those of the real set: 1 to 50,000."""
    if len(names) != NUM_VAL:
        return False
    return set(names) == {_NAME.format(i).encode() for i in range(1, NUM_VAL + 1)}


def match_labels(
    names: Sequence[bytes],
    labels: dict[bytes, bytes],
    source: str,
    problems: list[str] | None = None,
) -> list[bytes]:
    """The class of each image; images without a label and labels without an image are refused."""
    found: list[str] = []
    unlabelled = sorted(name for name in names if name not in labels)
    if unlabelled:
        found.append(f"{source} has no label for {_count(unlabelled)}; is it for another set?")
    missing = sorted(labels.keys() - set(names))
    if missing:
        found.append(
            f"{source} labels {_count(missing)} that are not in the archive; is it complete?"
        )
    if found and problems is None:
        raise DataError("; ".join(found))
    if problems is not None:
        problems += found
    return [labels.get(name, b"") for name in names]


def _count(names: Sequence[bytes]) -> str:
    shown = ", ".join(show(name).strip("'") for name in names[:3])
    return f"{count(len(names), 'image')} ({shown}{', …' if len(names) > 3 else ''})"


def read_labels(path: Path) -> dict[bytes, bytes]:
    """File name -> class, from a valprep.sh (never executed) or a LOC_val_solution.csv."""
    return parse_labels(path.read_bytes().decode("utf-8", "replace"), str(path))


def parse_labels(text: str, source: str) -> dict[bytes, bytes]:
    """File name -> class, from the text of either kind of label file."""
    parse = parse_solution if text.startswith(_SOLUTION_HEADER) else parse_valprep
    labels = parse(text, source)
    if not labels:
        raise UserError(
            f"{source} holds no labels; a {VALPREP} (lines `mv IMAGE CLASS/`) or a {SOLUTION} is "
            "read"
        )
    return labels


def parse_valprep(text: str, source: str) -> dict[bytes, bytes]:
    """The labels in the `mv IMAGE CLASS/` lines of a valprep.sh; other lines say nothing."""
    labels: dict[bytes, bytes] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip().rstrip(";")
        if not re.match(r"mv\s", line):
            continue
        match = _MOVE.fullmatch(line)
        if match is None:
            raise UserError(f"{source}:{number} is not `mv IMAGE CLASS/`: {line[:80]!r}")
        _add(labels, match[1], match[2], source, number)
    return labels


def parse_solution(text: str, source: str) -> dict[bytes, bytes]:
    """The labels of Kaggle's LOC_val_solution.csv: ImageId,PredictionString (class, box, …)."""
    labels: dict[bytes, bytes] = {}
    for number, line in enumerate(text.splitlines()[1:], 2):
        image, comma, prediction = line.strip().partition(",")
        words = prediction.strip('" ').split()
        if not image and not comma:
            continue
        if not image or not words:
            raise UserError(f"{source}:{number} is not `IMAGE,CLASS x y x y`: {line[:80]!r}")
        name = image if image.endswith(".JPEG") else f"{image}.JPEG"
        _add(labels, name, words[0], source, number)
    return labels


def _add(labels: dict[bytes, bytes], name: str, wnid: str, source: str, number: int) -> None:
    if wnid in (".", "..") or "/" in wnid or "/" in name or not wnid.isprintable():
        raise UserError(f"{source}:{number} names the class {wnid!r}, which is not a folder name")
    known = labels.setdefault(name.encode(), wnid.encode())
    if known != wnid.encode():
        raise UserError(
            f"{source}:{number} says {wnid} for {name}, an earlier line {known.decode()}"
        )


def builtin_labels() -> dict[bytes, bytes]:
    """The labels of the real ILSVRC2012 validation set, from the packed table."""
    wnids, ids = _unpack(_TABLE.read_bytes())
    return {_NAME.format(i + 1).encode(): wnids[k] for i, k in enumerate(ids)}


@functools.cache
def ilsvrc_classes() -> list[str]:
    """The 1,000 classes of ILSVRC2012, in bytewise order."""
    return [wnid.decode() for wnid in _unpack(_TABLE.read_bytes())[0]]


def pack_labels(labels: Sequence[bytes]) -> bytes:
    """The table's bytes: zlib of the sorted classes, an empty line and a uint16 for each image."""
    wnids = sorted(set(labels))
    id_of = {wnid: i for i, wnid in enumerate(wnids)}
    ids = np.array([id_of[wnid] for wnid in labels], "<u2")
    return zlib.compress(b"\n".join(wnids) + b"\n\n" + ids.tobytes(), 9)


def _unpack(packed: bytes) -> tuple[list[bytes], list[int]]:
    head, _, ids = zlib.decompress(packed).partition(b"\n\n")
    return head.split(b"\n"), np.frombuffer(ids, "<u2").tolist()
