"""A data set and its two splits: found at a path, opened, compared and identified (no torch)."""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dataset.archive.index import find_current, find_or_build_index
from dataset.archive.output_folder import find_unfinished
from dataset.errors import UserError
from dataset.names import KAGGLE_ZIP, TRAIN_TAR, VAL_TAR
from dataset.words import count
from train.data.sources import FolderSource, Source, TarSource

log = logging.getLogger("trainyard")


@dataclass(frozen=True)
class Dataset:
    """The two splits of a data set and what identifies it."""

    kind: str  # folder or tar
    path: str
    train: Source
    val: Source | None
    fingerprint: str


def open_dataset(
    path: Path, index_dir: Path | None, *, allow_empty: bool = False, val: Path | None = None
) -> Dataset:
    """The data set at a path; an extracted folder is preferred to a tar beside it.

    allow_empty: class folders without an image are classes too. val: its tar, if not by its name.
    """
    check_data(path)
    if _is_extracted(path):
        _check_finished(path)
        found = [path / split for split in ("train", "val") if (path / split).is_dir()]
        folders = [FolderSource(folder, allow_empty=allow_empty) for folder in found]
        return join_splits("folder", path, *folders)
    tars = _find_tars(path, val)
    sources = [open_tar(tar, index_dir) for tar in tars]
    return join_splits("tar", tars[0], *sources)


def open_tar(tar: Path, index_dir: Path | None) -> TarSource:
    """The images of a tar, which is indexed if it has to be."""
    return TarSource(find_or_build_index(tar, index_dir=index_dir))


def open_split(
    path: Path, split: str, index_dir: Path | None, *, allow_empty: bool = False
) -> Source:
    """The images of one split of a data set; a folder of classes and a tar are one by themselves.

    So data/train is as good as data, as for torchvision's ImageFolder.
    """
    if path.is_dir() and (_is_extracted(path) or _find_tars(path)):
        dataset = open_dataset(path, index_dir, allow_empty=allow_empty)
        source = dataset.train if split == "train" else dataset.val
        if source is None:
            raise UserError(f"{path} has no validation images: neither val/ nor {VAL_TAR}")
        return source
    if path.is_dir():
        _check_finished(path.parent)
        return FolderSource(path, allow_empty=allow_empty)
    if not path.exists():
        check_data(path)
    return TarSource(find_or_build_index(path, index_dir=index_dir))


def check_data(path: Path) -> None:
    """Raises if a path has neither an extracted folder nor a tar."""
    if not path.exists():
        raise UserError(f"no such data: {path}; name a folder with train/ and val/, or the tars")
    if not _is_extracted(path) and not _find_tars(path):
        raise UserError(
            f"{path} holds neither train/ nor {TRAIN_TAR}; name the folder that has one of them"
            + _hint_about_classes(path)
            + _hint_about_zip(path if path.is_dir() else path.parent)
        )


def needs_index(path: Path, index_dir: Path | None, val: Path | None = None) -> bool:
    """Whether a tar of the data set must be indexed; open_dataset reports missing data."""
    if not path.exists() or _is_extracted(path):
        return False
    found = (
        find_current(tar, index_dir=index_dir, labels=None, checksums=False)
        for tar in _find_tars(path, val)
    )
    return any(index is None for index in found)


def _is_extracted(path: Path) -> bool:
    return (path / "train").is_dir()


def _find_tars(path: Path, val: Path | None = None) -> list[Path]:
    """The tar of the training images and, where there is one, of the validation images."""
    folder = path if path.is_dir() else path.parent
    train = path if path.is_file() and path.name != VAL_TAR else folder / TRAIN_TAR
    found = val or find_val_beside(train)
    return [train, *([found] if found else [])] if train.is_file() else []


def find_val_beside(train: Path) -> Path | None:
    """The tar of the validation images in the folder of a training tar."""
    val = train.with_name(VAL_TAR)
    return val if val != train and val.is_file() else None


def _check_finished(folder: Path) -> None:
    """Raises if an extraction is unfinished: it would look like a smaller data set."""
    staging = find_unfinished(folder)
    if staging is not None:
        raise UserError(
            f"the extraction into {folder} is not finished; run the same command again, name the "
            f"tar to train from it, or remove {staging} to train on what is there"
        )


def fingerprint_of(*sources: Source | None) -> str:
    """A hash of every name and label: the same for a tar and for the folder extracted from it."""
    digest = hashlib.sha256()
    for source in sources:
        if source is None:
            continue
        digest.update("\0".join(source.classes).encode("utf-8", "surrogateescape"))
        digest.update(source.labels.astype("<i8").tobytes())
        # Checkpoints hold this value: the pieces and what is between the names must not change.
        for start in range(0, len(source), 4096):
            names = source.raw_names(start, min(start + 4096, len(source)))
            digest.update(b"\0".join(names))
    return digest.hexdigest()[:16]


def join_splits(kind: str, path: Path, train: Source, val: Source | None = None) -> Dataset:
    """The data set, with its training classes and their labels in both splits.

    Raises if a validation class is not among them.
    """
    if val is not None and val.classes != train.classes:
        known = {wnid: label for label, wnid in enumerate(train.classes)}
        strange = [wnid for wnid in val.classes if wnid not in known]
        if strange:
            raise UserError(
                f"{count(len(strange), 'validation class has', 'validation classes have')} "
                f"no training images, e.g. {strange[0]}; "
                "is val/ sorted into class folders?"
            )
        missing = sorted(known.keys() - set(val.classes), key=os.fsencode)
        if missing:
            text = "%d of %d training classes have no validation images, e.g. %s"
            log.info(text, len(missing), len(known), missing[0])
        # A validation set may lack a class; its labels must still be the training set's.
        val.labels = np.array([known[wnid] for wnid in val.classes])[val.labels]
    fingerprint = fingerprint_of(train, val)  # as checkpoints have it: of the classes of each split
    if val is not None:
        val.classes = train.classes
    return Dataset(kind, str(path), train, val, fingerprint)


def _hint_about_classes(path: Path) -> str:
    if path.is_dir() and any(child.is_dir() for child in path.iterdir()):
        return f"; if its folders are the classes, move them into {path / 'train'}"
    return ""


def _hint_about_zip(folder: Path) -> str:
    if (folder / KAGGLE_ZIP).exists():
        return f"; {KAGGLE_ZIP} must be extracted first with scripts/extract_ILSVRC_mp.py"
    return ""
