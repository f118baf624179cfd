"""An index that is not true of its tar is refused by the first wrong image that is read."""

from __future__ import annotations

import pickle
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dataset.archive.index import build_index
from dataset.archive.index_file import TarIndex
from dataset.errors import DataError
from tests.dataset.tars import (
    Tree,
    flatten,
    make_tree,
    nested_bytes,
    pack,
    tar_bytes,
    write_files,
    write_flat,
)
from train.data.sources import TarSource

FORMATS = {"gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT, "ustar": tarfile.USTAR_FORMAT}
LONG = "a" * 120  # longer than a header's own field


def read_all(index: TarIndex) -> list[bytes]:
    source = TarSource(index)
    return [source.read(i) for i in range(len(source))]


def find_first_refused(index: TarIndex) -> int:
    """The first image that is refused; len(index) if none is."""
    source = TarSource(index)
    for i in range(len(source)):
        try:
            source.read(i)
        except DataError as error:
            assert "python scripts/index_tar.py" in str(error) and "\n" not in str(error)
            return i
    return len(source)


def index_of(path: Path, data: bytes) -> TarIndex:
    path.write_bytes(data)
    return build_index(path)[0]


def nested(tmp_path: Path, tree: Tree | None = None) -> TarIndex:
    return index_of(tmp_path / "train.tar", nested_bytes(tree or make_tree()))


def tree_shaped(tmp_path: Path) -> TarIndex:
    return index_of(tmp_path / "train.tar", tar_bytes(flatten(make_tree())))


# --- true indexes -----------------------------------------------------------------------------


def rename(tree: Tree, wnid: Callable[[str], str], name: Callable[[str], str]) -> Tree:
    return {wnid(c): {name(n): data for n, data in files.items()} for c, files in tree.items()}


NAMES: dict[str, Callable[[Tree], Tree]] = {
    "plain": lambda tree: tree,
    "long files": lambda tree: rename(tree, str, lambda n: LONG + n),
    "long classes": lambda tree: rename(tree, lambda c: LONG + c, str),
    "long in both": lambda tree: rename(tree, lambda c: LONG + c, lambda n: LONG + n),
    "not ASCII": lambda tree: rename(tree, lambda c: "ö" + c, lambda n: "é" + n),
}


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("form", ["gnu", "pax"])
@pytest.mark.parametrize("shape", ["nested", "tree"])
def test_a_true_index_is_read(tmp_path: Path, shape: str, form: str, names: str) -> None:
    tree = NAMES[names](make_tree())
    data = (
        nested_bytes(tree, FORMATS[form])
        if shape == "nested"
        else tar_bytes(flatten(tree, "data/train/"), FORMATS[form])
    )
    expected = [flatten(tree)[name] for name in sorted(flatten(tree), key=str.encode)]
    assert read_all(index_of(tmp_path / "train.tar", data)) == expected


@pytest.mark.parametrize("program", ["tar", "bsdtar"])
@pytest.mark.parametrize("form", ["gnu", "ustar", "posix"])
def test_tars_of_other_programs_are_read(tmp_path: Path, program: str, form: str) -> None:
    """Class tars that begin with a folder or with another file, paths with ./ and long ones."""
    tree = make_tree()
    for wnid, files in tree.items():
        write_files(tmp_path / wnid, files)
        write_files(tmp_path / wnid, {"AAA.txt": bytes(20_000)})
        (tmp_path / "outer").mkdir(exist_ok=True)
        pack(program, form, tmp_path / wnid, tmp_path / "outer" / f"{wnid}.tar", dot=True)
        write_files(tmp_path / "tree" / ("d" * 90) / ("e" * 60) / wnid, files)
    expected = [flatten(tree)[name] for name in sorted(flatten(tree))]
    pack(program, form, tmp_path / "outer", tmp_path / "train.tar", dot=True)
    assert read_all(build_index(tmp_path / "train.tar")[0]) == expected
    pack(program, form, tmp_path / "tree", tmp_path / "tree.tar")
    assert read_all(build_index(tmp_path / "tree.tar")[0]) == expected


def test_a_flat_tar_is_read(tmp_path: Path) -> None:
    tar, expected = write_flat(tmp_path)
    assert sorted(read_all(build_index(tar)[0])) == sorted(expected.values())


def test_a_copy_for_another_process_checks_too(tmp_path: Path) -> None:
    index = nested(tmp_path)
    source = TarSource(index)
    source.read(0)
    copy = pickle.loads(pickle.dumps(source))
    assert copy.read(1) == source.read(1)
    copy.index.offset[2] += 512
    with pytest.raises(DataError, match=r"the index of .*train.tar is wrong"):
        copy.read(2)


# --- wrong indexes ----------------------------------------------------------------------------


def shift(index: TarIndex, num_bytes: int) -> TarIndex:
    return replace(index, offset=index.offset + num_bytes)


@pytest.mark.parametrize("make", [nested, tree_shaped])
@pytest.mark.parametrize("num_bytes", [1, -1, 512, -512, 1024])
def test_shifted_offsets_are_caught_by_the_first_image(
    tmp_path: Path, make: Callable[[Path], TarIndex], num_bytes: int
) -> None:
    index = make(tmp_path)
    assert find_first_refused(index) == len(index)
    assert find_first_refused(shift(index, num_bytes)) == 0


@pytest.mark.parametrize("make", [nested, tree_shaped])
def test_images_that_change_places_are_caught(
    tmp_path: Path, make: Callable[[Path], TarIndex]
) -> None:
    """Offsets and sizes of the neighbour: an image of the right class, under another's name."""
    index = make(tmp_path)
    rolled = replace(index, offset=np.roll(index.offset, 1), size=np.roll(index.size, 1))
    assert find_first_refused(rolled) == 0
    sizes = replace(index, size=np.maximum(1, index.size - 1))
    assert find_first_refused(sizes) == int(np.flatnonzero(index.size > 1)[0])


@pytest.mark.parametrize("make", [nested, tree_shaped])
def test_permuted_classes_are_caught_by_the_first_image_of_one(
    tmp_path: Path, make: Callable[[Path], TarIndex]
) -> None:
    index = make(tmp_path)
    swapped = replace(index, classes=[index.classes[i] for i in (0, 2, 1)])
    assert find_first_refused(swapped) == int((index.label == 0).sum())
    turned = replace(index, classes=[index.classes[i] for i in (2, 0, 1)])
    assert find_first_refused(turned) == 0


@pytest.mark.parametrize("make", [nested, tree_shaped])
def test_a_single_image_under_the_label_of_another_class_is_caught(
    tmp_path: Path, make: Callable[[Path], TarIndex]
) -> None:
    """The border between two classes lies one image too far."""
    index = make(tmp_path)
    for moved in (-1, 1):
        label = index.label.copy()
        border = int((label == 0).sum())
        label[border - 1 if moved < 0 else border] = 1 if moved < 0 else 0
        assert find_first_refused(replace(index, label=label)) < border + 1


def test_a_class_tar_is_refused_for_images_that_lie_elsewhere(tmp_path: Path) -> None:
    """Images of two classes are exchanged with their names: each header alone is right."""
    index = nested(tmp_path)
    last = np.flatnonzero(index.label == 2)[-1]
    order = np.arange(len(index))
    order[[3, last]] = last, 3
    names = [index.name(int(i)).encode() for i in order]
    mixed = replace(
        index,
        offset=index.offset[order],
        size=index.size[order],
        names=np.frombuffer(b"".join(names), np.uint8),
        name_offset=np.cumsum([0, *map(len, names)]),
    )
    assert find_first_refused(mixed) == 0
    with pytest.raises(DataError, match="all images of n01440764 in the bytes"):
        read_all(mixed)


def test_labels_of_a_flat_tar_cannot_be_seen_but_names_can(tmp_path: Path) -> None:
    index, _ = build_index(write_flat(tmp_path)[0])
    swapped = replace(index, classes=index.classes[::-1])
    assert find_first_refused(swapped) == len(index)  # what the check does not promise
    assert find_first_refused(shift(index, 512)) == 0


def test_an_image_without_room_for_a_header_is_refused(tmp_path: Path) -> None:
    index = nested(tmp_path)
    assert find_first_refused(replace(index, offset=np.full_like(index.offset, 100))) == 0
