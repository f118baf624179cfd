"""From the paths in an archive to its images in sample order: (class, file name), bytewise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from dataset.archive.member_names import are_plain_images, check_names, file_name, show, split_path
from dataset.errors import DataError
from dataset.names import is_class_tar, is_image, is_wnid
from dataset.words import count

Split = Literal["train", "val"]
LabelNames = Callable[[Sequence[bytes]], Sequence[bytes]]  # file names of a flat archive -> classes
Problems = list[str]  # what was left out, one line each
_SPLITS = {b"train", b"val", b"test"}
_FLAT, _LEFT_OUT = -1, -2  # in place of a class: its labels say it, or another split's


@dataclass(frozen=True)
class Found:
    """Images as they stand in an archive; class_id points into classes (-1: flat)."""

    classes: list[bytes]
    class_id: npt.NDArray[np.int32]
    names: list[bytes]
    row: npt.NDArray[np.int64]  # which entry of the archive
    num_skipped: int  # files that are no images


@dataclass(frozen=True)
class Listing:
    """The images of one split of an archive, in sample order."""

    classes: list[bytes]
    label: npt.NDArray[np.int32]
    names: list[bytes]
    offset: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]
    row: npt.NDArray[np.int64]  # which entry of the archive
    is_flat: bool  # the classes came from labels
    num_skipped: int
    last_header: int  # where the last header of the outer tar is


def check_outer_names(names: Sequence[bytes], path: Path) -> None:
    """Refuses an outer tar with two tars of one class, or with images between the class tars."""
    check_names(names, str(path))
    strays = [name for name in names if is_image(name)]
    if strays:
        raise DataError(f"{path} mixes class tars and images ({show(strays[0])}); repack it")
    counts = Counter(class_of_tar(name) for name in names if is_class_tar(name))
    for wnid, num in counts.items():
        if num > 1:
            raise DataError(f"{path}: two class tars for the class {show(wnid)}; repack it")
        if wnid in (b"", b".", b".."):
            raise DataError(f"{path}: the member {show(wnid + b'.tar')} names no class; repack it")


def class_of_tar(name: bytes) -> bytes:
    """The class of a class tar: n01440764 for ./n01440764.tar."""
    return file_name(name)[: -len(b".tar")]


def find_in_class(wnid: bytes, paths: Sequence[bytes], what: str) -> Found:
    """The images among the paths of one class tar."""
    check_names(paths, what)
    if are_plain_images(paths):
        ids = np.zeros(len(paths), np.int32)
        return Found([wnid], ids, list(paths), np.arange(len(paths)), 0)
    rows = [row for row, path in enumerate(paths) if is_image(path)]
    names = [name_in_class(wnid, paths[row], what) for row in rows]
    if not names:
        raise DataError(f"{what} holds no image; fetch it again")
    ids = np.zeros(len(names), np.int32)
    return Found([wnid], ids, names, np.array(rows, np.int64), len(paths) - len(names))


def name_in_class(wnid: bytes, path: bytes, what: str) -> bytes:
    """The file name of a member of a class tar: IMAGE, ./IMAGE or CLASS/IMAGE."""
    parts = split_path(path, what)
    if parts[:-1] not in ([], [wnid]):
        raise DataError(f"{what}: {show(path)} is in a folder of its own; repack it")
    return parts[-1]


def find_in_tree(paths: Sequence[bytes], split: Split, path: Path) -> Found:
    """The images of one split among the paths of a tree (CLASS/IMAGE below anything) or flat."""
    check_names(paths, str(path))
    folder_ids: dict[bytes, int] = {}
    rows, names, ids = [], [], []
    for row, member in enumerate(paths):
        if is_image(member):
            folder, _, name = member.rpartition(b"/")
            rows.append(row)
            names.append(name)
            ids.append(folder_ids.setdefault(folder, len(folder_ids)))
    num_images = len(names)
    if not names:
        raise DataError(f"{path} holds no images; fetch it again")
    classes, class_of_folder = classify_folders(list(folder_ids), split, path)
    class_id = class_of_folder[np.array(ids)]
    keep = np.flatnonzero(class_id > _LEFT_OUT)
    return Found(
        classes,
        class_id[keep],
        names if len(keep) == len(names) else [names[i] for i in keep.tolist()],
        np.array(rows, np.int64)[keep],
        len(paths) - num_images,
    )


def classify_folders(
    folders: Sequence[bytes], split: Split, path: Path
) -> tuple[list[bytes], npt.NDArray[np.int32]]:
    """The classes, and for each folder with images its class, -1 (flat) or -2 (another split)."""
    parts = [_parts(folder) for folder in folders]
    below: list[list[bytes] | None] = list(parts)
    if any(_SPLITS & set(part) for part in parts):
        below = [_below(part, split) for part in parts]
    depths = {len(part) for part in below if part is not None}
    if not depths:
        raise DataError(f"{path} has no images of the split {split!r}, only of others")
    check_depths(depths, path)
    named = {part[-1]: None for part in below if part}
    if split == "val" and len(named) == 1 and not is_wnid(next(iter(named))):
        named = {}  # one folder around a flat archive
    if not named and split == "train":
        raise DataError(
            f"{path}: its images are in no class folder or class tar; is it a train tar?"
        )
    class_ids = {name: i for i, name in enumerate(named)}
    ids = [_LEFT_OUT if part is None else class_ids[part[-1]] if named else _FLAT for part in below]
    return list(named), np.array(ids, np.int32)


def check_depths(depths: Collection[int], path: Path) -> None:
    """Refuses images at different depths, since it is unclear which folder is the class."""
    if len(depths) > 1:
        raise DataError(
            f"{path}: images at different depths of folders {sorted(depths)}; repack it"
        )


def folders_below(folder: bytes, split: Split) -> list[bytes] | None:
    """The folders from the top of a split down to one of a tree; None in another split."""
    parts = _parts(folder)
    return _below(parts, split) if _SPLITS & set(parts) else parts


def _parts(folder: bytes) -> list[bytes]:
    return [part for part in folder.split(b"/") if part not in (b"", b".")]


def _below(parts: list[bytes], split: Split) -> list[bytes] | None:
    """What follows the folder of a split; None in a path of another split."""
    name = split.encode()
    return parts[parts.index(name) + 1 :] if name in parts else None


def order_images(
    found: Found,
    offset: npt.NDArray[np.int64],
    size: npt.NDArray[np.int64],
    label_names: LabelNames,
    path: Path,
    last_header: int = 0,
) -> Listing:
    """The images in sample order, with the place of each in the archive."""
    class_of, ids = found.classes, found.class_id
    is_flat = bool(ids[0] == _FLAT)
    if is_flat:
        wnids = label_names(found.names)
        class_of = sorted(set(wnids) - {b""})
        id_of = {b"": _LEFT_OUT} | {name: i for i, name in enumerate(class_of)}
        ids = np.fromiter((id_of[name] for name in wnids), np.int32, len(wnids))
    if not class_of:
        raise DataError(f"{path}: none of its {len(found.names)} images has a label")
    classes = sorted(class_of)
    rank = {name: i for i, name in enumerate(classes)}
    unordered = np.array([rank[name] for name in class_of], np.int32)[ids]
    unordered[ids == _LEFT_OUT] = _LEFT_OUT
    order = np.argsort(unordered, kind="stable")[int((ids == _LEFT_OUT).sum()) :]
    label = unordered[order]
    _sort_names(order, np.searchsorted(label, np.arange(len(classes) + 1)), classes, found, path)
    rows = found.row[order]
    names = [found.names[i] for i in order.tolist()]
    empty = np.flatnonzero(size[rows] == 0)
    if len(empty):
        images = count(len(empty), "image is", "images are")
        raise DataError(f"{path}: {images} empty (0 bytes), first {show(names[empty[0]])}")
    return Listing(
        classes,
        label,
        names,
        offset[rows],
        size[rows],
        rows,
        is_flat,
        found.num_skipped,
        last_header,
    )


def _sort_names(
    order: npt.NDArray[np.int64],
    bounds: npt.NDArray[np.int64],
    classes: list[bytes],
    found: Found,
    path: Path,
) -> None:
    """Sorts `order` in place within each class by name; two equal names are an error."""
    for wnid, start, end in zip(classes, bounds, bounds[1:], strict=False):
        rows = sorted(order[start:end].tolist(), key=found.names.__getitem__)
        order[start:end] = rows
        counts = Counter(map(found.names.__getitem__, rows))
        if len(counts) < len(rows):
            twice = wnid + b"/" + counts.most_common(1)[0][0]
            raise DataError(f"{path}: two members are {show(twice)}; repack it")
