"""The archives of a fake ImageNet in the formats of the real ones: tars, zip, labels."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np

from dataset.errors import UserError
from dataset.fake.draw import Draw, Item
from dataset.names import KAGGLE_ZIP, SOLUTION, TRAIN_TAR, VAL_TAR, VALPREP

SHAPES = ("nested", "tree", "zip")
TREE_ROOT = "ILSVRC2012_img_train"
ODDITIES = ("CMYK", "GREY", "PNG")
TRAIN, VAL = 0, 1  # the split's number in a picture's random stream
DATE = (2012, 6, 14, 12, 0, 0)  # one constant date, so that equal seeds give equal archives
MTIME = 1339675200  # the same in seconds


@dataclass(frozen=True)
class FakeImageNet:
    """What the archives hold; equal values give equal bytes."""

    classes: int = 10
    train_per_class: int = 50
    val_per_class: int = 10
    size: tuple[int, int] = (500, 375)
    shape: str = "nested"
    seed: int = 0
    oddities: bool = False

    def __post_init__(self) -> None:
        for name, low, high in (
            ("classes", 1, 100_000),
            ("train_per_class", 1, 1_000_000),
            ("val_per_class", 0, 1_000_000),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                flag = "--" + name.replace("_", "-")
                raise UserError(f"{flag} {value} is out of range; give {low} to {high}")
        check_range(self.size, self.seed)
        if self.shape not in SHAPES:
            raise UserError(f"--shape {self.shape} is unknown; give one of {', '.join(SHAPES)}")

    @property
    def num_train(self) -> int:
        return self.classes * self.train_per_class

    @property
    def num_val(self) -> int:
        return self.classes * self.val_per_class

    @property
    def wnids(self) -> list[str]:
        """Class names outside WordNet's numbers, so that no fake looks like a real class."""
        return [f"n{90_000_001 + label}" for label in range(self.classes)]


def check_range(size: tuple[int, int], seed: int) -> None:
    """Raises for pictures that cannot be drawn."""
    if not all(16 <= side <= 2000 for side in size):
        text = "x".join(map(str, size))
        raise UserError(f"--size {text} is out of range; give 16x16 to 2000x2000")
    if not 0 <= seed <= 2**63:
        raise UserError(f"--seed {seed} is out of range; give 0 to {2**63}")


def train_items(spec: FakeImageNet) -> list[Item]:
    """The training pictures, class by class, their numbers neither dense nor in order."""
    items = []
    for label, wnid in enumerate(spec.wnids):
        rng = np.random.default_rng([spec.seed, 4, label])
        numbers = rng.choice(20 * spec.train_per_class, spec.train_per_class, replace=False)
        items += [
            Item(f"{wnid}_{number}.JPEG", spec.seed, TRAIN, label, index, spec.size)
            for index, number in enumerate(numbers)
        ]
    if spec.oddities:  # spread over the set, as in the real one
        step = max(1, len(items) // len(ODDITIES))
        for position, kind in zip(range(0, len(items), step), ODDITIES, strict=False):
            items[position] = replace(items[position], kind=kind)
    return items


def val_items(spec: FakeImageNet) -> list[Item]:
    """The validation pictures, their classes shuffled over the numbers 1..n as in the real set."""
    labels = np.repeat(np.arange(spec.classes), spec.val_per_class)
    np.random.default_rng([spec.seed, 5]).shuffle(labels)
    return [
        Item(f"ILSVRC2012_val_{i + 1:08d}.JPEG", spec.seed, VAL, int(label), i, spec.size)
        for i, label in enumerate(labels)
    ]


def write_archives(spec: FakeImageNet, folder: Path, draw: Draw) -> int:
    """Writes every file of the set into the folder; returns the bytes of all pictures."""
    solution, val_bytes = _write_val(spec, folder, draw)
    (folder / SOLUTION).write_text(solution)
    (folder / VALPREP).write_text(_valprep_text(spec))
    (folder / VALPREP).chmod(0o755)
    write_train = {"nested": _write_nested, "tree": _write_tree, "zip": _write_zip}[spec.shape]
    return val_bytes + write_train(spec, folder, draw)


def _write_val(spec: FakeImageNet, folder: Path, draw: Draw) -> tuple[str, int]:
    """Writes the flat validation tar; returns the text of LOC_val_solution.csv and the bytes."""
    rows, num_bytes = [], 0
    with tarfile.open(folder / VAL_TAR, "w", format=tarfile.USTAR_FORMAT) as tar:
        for item, picture in draw(val_items(spec)):
            _add(tar, item.name, picture.data)
            num_bytes += len(picture.data)
            box = " ".join(map(str, picture.box))
            stem = item.name.removesuffix(".JPEG")
            rows.append(f"{stem},{spec.wnids[item.label]} {box} \n")  # the space is Kaggle's
    np.random.default_rng([spec.seed, 6]).shuffle(rows)
    return "".join(["ImageId,PredictionString\n", *rows]), num_bytes


def _valprep_text(spec: FakeImageNet) -> str:
    """The shell script that sorts the validation pictures into class folders."""
    folders = [f"mkdir -p {wnid}\n" for wnid in spec.wnids]
    moves = [f"mv {item.name} {spec.wnids[item.label]}/\n" for item in val_items(spec)]
    return "".join(["#!/bin/bash\n", "\n", *folders, "\n", *moves])


def _write_nested(spec: FakeImageNet, folder: Path, draw: Draw) -> int:
    """The training tar in the published layout: one tar per class inside."""
    num_bytes = 0
    with tarfile.open(folder / TRAIN_TAR, "w", format=tarfile.USTAR_FORMAT) as outer:
        for label, drawn in groupby(draw(train_items(spec)), key=lambda pair: pair[0].label):
            buffer = io.BytesIO()
            with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as inner:
                for item, picture in drawn:
                    _add(inner, item.name, picture.data)
                    num_bytes += len(picture.data)
            _add(outer, f"{spec.wnids[label]}.tar", buffer.getvalue())
    return num_bytes


def _write_tree(spec: FakeImageNet, folder: Path, draw: Draw) -> int:
    """The training tar as `tar cf` makes it from an extracted set: a root with class folders."""
    num_bytes = 0
    with tarfile.open(folder / TRAIN_TAR, "w", format=tarfile.USTAR_FORMAT) as tar:
        _add_folder(tar, TREE_ROOT)
        for label, drawn in groupby(draw(train_items(spec)), key=lambda pair: pair[0].label):
            class_folder = f"{TREE_ROOT}/{spec.wnids[label]}"
            _add_folder(tar, class_folder)
            for item, picture in drawn:
                _add(tar, f"{class_folder}/{item.name}", picture.data)
                num_bytes += len(picture.data)
    return num_bytes


def _write_zip(spec: FakeImageNet, folder: Path, draw: Draw) -> int:
    """The zip of Kaggle's challenge: both splits, the validation set flat, and the tables."""
    num_bytes = 0
    images = "ILSVRC/Data/CLS-LOC"
    with zipfile.ZipFile(folder / KAGGLE_ZIP, "w") as archive:
        for name, data in _read_tar(folder / VAL_TAR):
            _add_to_zip(archive, f"{images}/val/{name}", data)
        for item, picture in draw(train_items(spec)):
            path = f"{images}/train/{spec.wnids[item.label]}/{item.name}"
            _add_to_zip(archive, path, picture.data)
            num_bytes += len(picture.data)
        synsets = "".join(f"{wnid} fake class {i}\n" for i, wnid in enumerate(spec.wnids))
        _add_to_zip(archive, "LOC_synset_mapping.txt", synsets.encode())
        _add_to_zip(archive, SOLUTION, (folder / SOLUTION).read_bytes())
    return num_bytes


def _read_tar(path: Path) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(path) as tar:
        for member in tar:
            file = tar.extractfile(member)
            assert file is not None, "the validation tar holds files only"
            yield member.name, file.read()


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mtime = len(data), MTIME
    tar.addfile(info, io.BytesIO(data))


def _add_folder(tar: tarfile.TarFile, name: str) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.mtime = tarfile.DIRTYPE, 0o755, MTIME
    tar.addfile(info)


def _add_to_zip(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    info = zipfile.ZipInfo(name, DATE)
    info.external_attr = 0o644 << 16
    # Kaggle's members are deflated; level 1 is enough, since a JPEG hardly shrinks.
    archive.writestr(info, data, zipfile.ZIP_DEFLATED, compresslevel=1)
