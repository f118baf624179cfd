"""Kaggle's zip is read and extracted without an unzip program, and checked member by member."""

from __future__ import annotations

import gzip
import os
import struct
import zipfile
from pathlib import Path

import pytest

from dataset.archive.extract import Extraction, extract_archive
from dataset.archive.index import build_index
from dataset.archive.zip_directory import read_directory
from dataset.errors import DataError, UserError
from tests.dataset.tars import (
    extract,
    flatten,
    make_tree,
    make_val,
    nested_bytes,
    read_tree,
    sorted_by_class,
    write_solution,
)

PREFIX = "ILSVRC/Data/CLS-LOC/"
NAME = "imagenet-object-localization-challenge.zip"


def write_zip(
    path: Path, method: int, with_labels: bool = True
) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Kaggle's layout; what must come out of train and val."""
    train = make_tree()
    images, labels = make_val()
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("ILSVRC/", b"")
        for name, data in flatten(train, f"{PREFIX}train/").items():
            archive.writestr(name, data)
            archive.writestr(name.replace("Data", "Annotations").replace("JPEG", "xml"), b"<a/>")
        for name, data in images.items():
            archive.writestr(f"{PREFIX}val/{name}", data)
        archive.writestr(f"{PREFIX}test/ILSVRC2012_test_00000001.JPEG", b"test")
        if with_labels:
            write_solution(path.with_name("labels"), labels)
            archive.write(path.with_name("labels"), "LOC_val_solution.csv")
    return flatten(train), sorted_by_class(images, labels)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_kaggles_zip_is_extracted_with_the_labels_inside(tmp_path: Path, method: int) -> None:
    train, val = write_zip(tmp_path / NAME, method)
    for split, expected in (("train", train), ("val", val)):
        result = extract(tmp_path / NAME, tmp_path / "out", split)
        assert read_tree(tmp_path / "out" / split) == expected
        assert result.num_images == len(expected)


def test_a_zip_whose_labels_are_nowhere_is_refused(tmp_path: Path) -> None:
    write_zip(tmp_path / NAME, zipfile.ZIP_STORED, with_labels=False)
    with pytest.raises(UserError, match="labels are unknown"):
        extract_archive(Extraction(tmp_path / NAME, "val", tmp_path / "out"))


def test_the_directory_agrees_with_zipfile(tmp_path: Path) -> None:
    write_zip(tmp_path / NAME, zipfile.ZIP_DEFLATED)
    with open(tmp_path / NAME, "rb") as file, zipfile.ZipFile(tmp_path / NAME) as peer:
        ours = read_directory(file.fileno(), tmp_path / NAME)
        theirs = [info for info in peer.infolist() if not info.is_dir()]
        assert ours.names == [info.filename.encode() for info in theirs]
        assert ours.header.tolist() == [info.header_offset for info in theirs]
        assert ours.packed.tolist() == [info.compress_size for info in theirs]
        assert ours.size.tolist() == [info.file_size for info in theirs]


def test_zip64_numbers_are_read(tmp_path: Path) -> None:
    """A member behind a hole of 5 GiB, as zipfile writes it."""
    path = tmp_path / NAME
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("train/n01/a.JPEG", b"in front")
        archive.start_dir = 5 << 30  # where zipfile puts the next member
        archive.writestr("train/n01/b.JPEG", b"behind 5 GiB")
    extract_archive(Extraction(path, "train", tmp_path / "out"))
    expected = {"n01/a.JPEG": b"in front", "n01/b.JPEG": b"behind 5 GiB"}
    assert read_tree(tmp_path / "out" / "train") == expected


def test_more_than_65535_members_are_read(tmp_path: Path) -> None:
    path = tmp_path / NAME
    with zipfile.ZipFile(path, "w") as archive:
        for i in range(66000):
            archive.writestr(f"notes/{i}", b"")
        archive.writestr("train/n01/a.JPEG", b"last")
    extract_archive(Extraction(path, "train", tmp_path / "out"))
    assert read_tree(tmp_path / "out" / "train") == {"n01/a.JPEG": b"last"}


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_flipped_byte_of_an_image_is_found_and_its_class_not_named(
    tmp_path: Path, method: int
) -> None:
    train, _ = write_zip(tmp_path / NAME, method)
    data = bytearray((tmp_path / NAME).read_bytes())
    with zipfile.ZipFile(tmp_path / NAME) as archive:
        victim = max(archive.infolist(), key=lambda info: info.compress_size)
    data[victim.header_offset + 30 + len(victim.filename) + 20] ^= 4
    (tmp_path / NAME).write_bytes(data)
    wnid = victim.filename.removeprefix(f"{PREFIX}train/").split("/")[0]
    split = "train" if "train" in victim.filename else "val"
    with pytest.raises(DataError, match="damaged"):
        extract(tmp_path / NAME, tmp_path / "out", split, keep_going=True)
    if split == "train":
        assert not (tmp_path / "out" / "train" / wnid).exists()
        assert read_tree(tmp_path / "out" / "train") == {
            name: data for name, data in train.items() if not name.startswith(wnid)
        }


def test_bad_zips_are_refused(tmp_path: Path) -> None:
    def write(name: str, mode: int = 0, data: bytes = b"x", method: int = 0) -> Path:
        info = zipfile.ZipInfo(name)
        info.external_attr, info.create_system, info.compress_type = mode << 16, 3, method
        with zipfile.ZipFile(tmp_path / NAME, "w") as archive:
            archive.writestr("train/n01/good.JPEG", b"good")
            archive.writestr(info, data)
        return tmp_path / NAME

    def refuse(path: Path, words: str) -> None:
        with pytest.raises(DataError, match=words):
            extract_archive(Extraction(path, "train", tmp_path / "out"))
        assert not list((tmp_path / "out").rglob("*"))

    refuse(write("train/../../escape.JPEG"), "outside")
    refuse(write("/etc/escape.JPEG"), "outside")
    refuse(write("train/n01/link.JPEG", 0o120777, b"/etc/passwd"), "link")
    refuse(write("train/n01/zero.JPEG", 0o100644, b""), "empty")
    refuse(write("train/n01/a\nb.JPEG"), "control character")
    refuse(write("train/n01/x.JPEG", method=zipfile.ZIP_LZMA), "method 14")
    path = write("train/n01/x.JPEG")
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    refuse(path, "truncated")
    encrypted = bytearray(whole)
    place = encrypted.rindex(b"PK\1\2")
    struct.pack_into("<H", encrypted, place + 8, 1)
    path.write_bytes(encrypted)
    refuse(path, "encrypted")
    path.write_bytes(b"PK\3\4" + os.urandom(2000))
    refuse(path, "truncated zip")


def test_a_name_that_is_twice_in_a_zip_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / NAME, "w") as archive:
        archive.writestr("train/n01/a.JPEG", b"one")
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("train/n01/a.JPEG", b"two")
    with pytest.raises(DataError, match=r"two members are 'n01/a\.JPEG"):
        extract_archive(Extraction(tmp_path / NAME, "train", tmp_path / "out"))


def test_names_keep_their_bytes_whatever_their_encoding(tmp_path: Path) -> None:
    """Flagged as UTF-8, or without a flag: then zipfile decodes them as cp437."""
    with zipfile.ZipFile(tmp_path / NAME, "w") as archive:
        archive.writestr("train/n01/ä.JPEG", b"utf-8")
        archive.writestr("train/n01/zzz.JPEG", b"plain")
    data = (tmp_path / NAME).read_bytes().replace(b"zzz.JPEG", b"\xe4\xff\x80.JPEG")
    (tmp_path / NAME).write_bytes(data)
    with open(tmp_path / NAME, "rb") as file:
        names = read_directory(file.fileno(), tmp_path / NAME).names
    assert names == ["train/n01/ä.JPEG".encode(), b"train/n01/\xe4\xff\x80.JPEG"]


def test_a_damaged_directory_is_refused_wherever_it_is_damaged(tmp_path: Path) -> None:
    """Whatever zipfile raises for it, the user reads one line."""
    with zipfile.ZipFile(tmp_path / NAME, "w") as archive:
        for name in ("train/n01/a.JPEG", "train/n01/ö.JPEG"):
            archive.writestr(name, b"x")
    whole = (tmp_path / NAME).read_bytes()
    start = whole.index(b"PK\1\2")
    damaged = 0
    for position in range(start, len(whole)):
        data = bytearray(whole)
        data[position] ^= 0xFF
        (tmp_path / NAME).write_bytes(data)
        with open(tmp_path / NAME, "rb") as file:
            try:
                read_directory(file.fileno(), tmp_path / NAME)
            except DataError as error:
                damaged += "fetch it again" in str(error)
    assert damaged > 20


def test_a_zip_bomb_is_cut_at_the_size_that_it_tells(tmp_path: Path) -> None:
    """A member that unpacks to more than its directory says is damaged, and is not unpacked."""
    with zipfile.ZipFile(tmp_path / NAME, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("train/n01/a.JPEG", bytes(50 << 20))
    data = bytearray((tmp_path / NAME).read_bytes())
    place = data.rindex(b"PK\1\2")
    struct.pack_into("<L", data, place + 24, 1000)
    (tmp_path / NAME).write_bytes(data)
    with pytest.raises(DataError, match="1001 bytes"):
        extract_archive(Extraction(tmp_path / NAME, "train", tmp_path / "out"))


def test_no_index_is_made_of_a_zip_or_a_gzip(tmp_path: Path) -> None:
    write_zip(tmp_path / NAME, zipfile.ZIP_STORED)
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(nested_bytes(make_tree())))
    for name in (NAME, "a.tar.gz"):
        with pytest.raises(UserError, match="needs an uncompressed tar"):
            build_index(tmp_path / name)
