"""A .tar.gz is extracted, repaired and refused as the tar in it would be."""

from __future__ import annotations

import gzip
import hashlib
import os
from pathlib import Path

import pytest

from dataset.errors import DataError, UserError
from tests.dataset.tars import (
    extract,
    flatten,
    inodes,
    make_tree,
    make_val,
    nested_bytes,
    read_tree,
    sorted_by_class,
    tar_bytes,
    write_valprep,
)


@pytest.mark.parametrize("shape", ["nested", "tree", "flat", "flat in a folder"])
def test_a_tar_gz_is_read_through(tmp_path: Path, shape: str) -> None:
    tree = make_tree(3, 8)
    images, labels = make_val()
    data = {
        "nested": nested_bytes(tree),
        "tree": tar_bytes(flatten(tree, "./train/") | {"./train/notes.txt": b"x"}),
        "flat": tar_bytes(images),
        "flat in a folder": tar_bytes({f"./img_val/{name}": images[name] for name in images}),
    }[shape]
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(data))
    write_valprep(tmp_path / "valprep.sh", labels)
    split = "val" if shape.startswith("flat") else "train"
    result = extract(tmp_path / "a.tar.gz", tmp_path / "out", split)
    expected = sorted_by_class(images, labels) if split == "val" else flatten(tree)
    assert read_tree(tmp_path / "out" / split) == expected
    assert result.num_images == len(expected)
    assert set(os.listdir(tmp_path / "out")) == {split, f".{split}.extracted.json"}


@pytest.mark.parametrize("where", ["middle", "sum at the end"])
def test_a_damaged_tar_gz_names_no_class(tmp_path: Path, where: str) -> None:
    data = bytearray(gzip.compress(nested_bytes(make_tree(6, 9)), mtime=0))
    if where == "middle":
        del data[len(data) // 2 :]
    else:
        data[-6] ^= 1
    (tmp_path / "a.tar.gz").write_bytes(data)
    with pytest.raises(DataError, match="damaged or truncated"):
        extract(tmp_path / "a.tar.gz", tmp_path / "out")
    assert read_tree(tmp_path / "out" / "train") == {}


def test_a_tar_gz_of_unlabelled_images_or_of_two_depths_is_refused(tmp_path: Path) -> None:
    for number, names in enumerate((["img_val/a.JPEG"], ["n01/a.JPEG", "x/n02/b.JPEG"])):
        archive = tmp_path / f"{number}.tar.gz"
        archive.write_bytes(gzip.compress(tar_bytes(dict.fromkeys(names, b"x"))))
        with pytest.raises((DataError, UserError), match=r"label|depths"):
            extract(archive, tmp_path / "out", "val")
        assert read_tree(tmp_path / "out" / "val") == {}


@pytest.mark.parametrize("damage", ["missing", "empty"])
def test_a_tar_gz_is_repaired_in_one_go(tmp_path: Path, damage: str) -> None:
    tree = make_tree(3, 8)
    data = gzip.compress(nested_bytes(tree))
    (tmp_path / "a.tar.gz").write_bytes(data)
    extract(tmp_path / "a.tar.gz", tmp_path / "out")
    before = inodes(tmp_path / "out" / "train")
    victim = sorted((tmp_path / "out" / "train").rglob("*.JPEG"))[3]
    victim.unlink() if damage == "missing" else os.truncate(victim, 0)
    md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
    result = extract(tmp_path / "a.tar.gz", tmp_path / "out", md5=md5)
    assert read_tree(tmp_path / "out" / "train") == flatten(tree)
    assert result.num_bytes_written == victim.stat().st_size
    assert len(inodes(tmp_path / "out" / "train").items() & before.items()) >= len(before) - 1


def test_a_tar_gz_cannot_keep_going(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(nested_bytes(make_tree())))
    with pytest.raises(UserError, match="--keep_going"):
        extract(tmp_path / "a.tar.gz", tmp_path / "out", keep_going=True)


def test_a_tar_gz_whose_classes_are_mixed_is_whole_in_the_end(tmp_path: Path) -> None:
    tree = make_tree(3, 8)
    names = sorted(flatten(tree), key=lambda name: name[::-1])
    (tmp_path / "a.tgz").write_bytes(gzip.compress(tar_bytes({n: flatten(tree)[n] for n in names})))
    extract(tmp_path / "a.tgz", tmp_path / "out")
    assert read_tree(tmp_path / "out" / "train") == flatten(tree)
