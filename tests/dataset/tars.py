"""Small ILSVRC-shaped archives for the tests, written by GNU tar, bsdtar, tarfile or zipfile."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dataset.archive.extract import Extraction, Result, extract_archive
from dataset.archive.index_file import TarIndex, write_whole

TRAIN, VAL = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
AWKWARD_SIZES = (1, 511, 512, 513, 1024)
Tree = dict[str, dict[str, bytes]]  # class -> file name -> bytes


def make_tree(num_classes: int = 3, per_class: int = 6, seed: int = 0) -> Tree:
    """Classes of images with random bytes; the sizes include those around tar's 512."""
    random = np.random.default_rng(seed)
    tree: Tree = {}
    for c in range(num_classes):
        wnid = f"n{1440764 + 1111 * c:08d}"
        sizes = [*AWKWARD_SIZES, *random.integers(1, 5000, max(0, per_class - 5)).tolist()]
        names = [f"{wnid}_{int(random.integers(1, 10)) * 1000 + i}.JPEG" for i in range(per_class)]
        tree[wnid] = {n: random.bytes(s) for n, s in zip(names, sizes[:per_class], strict=True)}
    return tree


def make_val(num: int = 12, seed: int = 1) -> tuple[dict[str, bytes], dict[str, str]]:
    """Validation images, and the class of each."""
    random = np.random.default_rng(seed)
    names = [f"ILSVRC2012_val_{i:08d}.JPEG" for i in range(1, num + 1)]
    images = {name: random.bytes(int(random.integers(1, 3000))) for name in names}
    wnids = [f"n{1440764 + 1111 * c:08d}" for c in range(3)]
    return images, {name: wnids[int(random.integers(0, 3))] for name in names}


def sorted_by_class(images: Mapping[str, bytes], labels: Mapping[str, str]) -> dict[str, bytes]:
    """CLASS/IMAGE -> bytes of a labelled set."""
    return {f"{labels[name]}/{name}": data for name, data in images.items()}


def flatten(tree: Tree, prefix: str = "") -> dict[str, bytes]:
    """CLASS/IMAGE -> bytes."""
    return {
        f"{prefix}{c}/{name}": data for c, files in tree.items() for name, data in files.items()
    }


def tar_bytes(files: Mapping[str, bytes], format: int = tarfile.GNU_FORMAT) -> bytes:
    """A tar of plain files, by Python's tarfile."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def nested_bytes(tree: Tree, format: int = tarfile.GNU_FORMAT) -> bytes:
    """The train tar's shape: a tar of class tars."""
    return tar_bytes({f"{c}.tar": tar_bytes(files, format) for c, files in tree.items()}, format)


def write_nested(folder: Path, tree: Tree) -> Path:
    """The train tar of a tree, under its usual name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TRAIN).write_bytes(nested_bytes(tree))
    return folder / TRAIN


def write_flat(folder: Path, num: int = 12) -> tuple[Path, dict[str, bytes]]:
    """A flat val tar with a valprep.sh beside it, and what must come out of it."""
    folder.mkdir(parents=True, exist_ok=True)
    images, labels = make_val(num)
    (folder / VAL).write_bytes(tar_bytes(images))
    write_valprep(folder / "valprep.sh", labels)
    return folder / VAL, sorted_by_class(images, labels)


def write_valprep(path: Path, labels: Mapping[str, str]) -> None:
    """A valprep.sh with the lines of the usual one."""
    lines = [f"mkdir -p {wnid}" for wnid in sorted(set(labels.values()))]
    lines += [f"mv {name} {wnid}/" for name, wnid in labels.items()]
    path.write_text("\n".join(lines) + "\n")


def write_solution(path: Path, labels: Mapping[str, str]) -> None:
    """Kaggle's LOC_val_solution.csv."""
    lines = ["ImageId,PredictionString"]
    lines += [f"{name.removesuffix('.JPEG')},{wnid} 1 2 3 4 " for name, wnid in labels.items()]
    path.write_text("\n".join(lines) + "\n")


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes files below a folder."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def pack(program: str, form: str, folder: Path, archive: Path, dot: bool = False) -> None:
    """Packs what is in a folder with GNU tar or bsdtar in one of the formats of GNU tar."""
    form = {"gnu": "gnutar", "posix": "pax"}.get(form, form) if program == "bsdtar" else form
    members = ["."] if dot else sorted(path.name for path in folder.iterdir())
    command = [program, f"--format={form}", "-cf", str(archive), "-C", str(folder), *members]
    subprocess.run(command, check=True, capture_output=True)


def read_tree(folder: Path) -> dict[str, bytes]:
    """Relative path -> bytes of every file below a folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def read_index(index: TarIndex) -> dict[str, bytes]:
    """CLASS/IMAGE -> bytes, in the order of the index, read as the trainer reads."""
    with open(index.tar, "rb") as file:
        fd = file.fileno()
        return {
            f"{index.classes[index.label[i]]}/{index.name(i)}": os.pread(
                fd, int(index.size[i]), int(index.offset[i])
            )
            for i in range(len(index))
        }


def header(
    name: bytes, size: bytes | int, kind: bytes = b"0", magic: bytes = b"ustar  \0"
) -> bytes:
    """A tar header made by hand, its checksum right."""
    block = bytearray(512)
    block[: len(name)] = name
    block[100:108] = b"0000644\0"
    block[124:136] = size if isinstance(size, bytes) else b"%011o\0" % size
    block[136:148] = b"00000000000\0"
    block[156:157] = kind
    block[257 : 257 + len(magic)] = magic
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def pad(data: bytes) -> bytes:
    """Data filled up to whole blocks."""
    return data + bytes(-len(data) % 512)


END = bytes(1024)


def extract(archive: Path, out: Path, split: Any = "train", **flags: Any) -> Result:
    """What the extractor says of an archive."""
    return extract_archive(Extraction(archive, split, out, **flags))


def inodes(folder: Path) -> dict[str, tuple[int, int]]:
    """Name -> (inode, time of change) of every file below a folder."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    stats = {str(path.relative_to(folder)): path.stat() for path in paths}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}


def drop_unit_sums(index: Path) -> None:
    """Makes an index one of format 1, as earlier versions wrote it."""
    with np.load(index) as file:
        arrays = {name: file[name] for name in file.files if not name.startswith("unit_")}
    write_whole(arrays | {"format": np.int64(1)}, index)
