"""Headers of every tar format are read as GNU tar and bsdtar write them; shapes are detected."""

from __future__ import annotations

import os
import random
import tarfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset.archive import tar_images as archive
from dataset.archive.listing import Listing, Split
from dataset.archive.tar_header import iter_tar
from dataset.archive.tar_images import list_tar
from dataset.archive.tar_walk import walk_tar
from tests.dataset.tars import (
    END,
    flatten,
    header,
    make_tree,
    nested_bytes,
    pack,
    pad,
    tar_bytes,
    write_files,
)

FORMATS = ("v7", "ustar", "gnu", "posix")
PROGRAMS = ("tar", "bsdtar")


def no_labels(names: object) -> list[bytes]:
    raise AssertionError("labels were asked for")


def list_path(path: Path, split: Split = "train") -> Listing:
    with open(path, "rb") as file:
        return list_tar(file.fileno(), path, split, no_labels)


def contents(path: Path, listing: Listing) -> dict[str, bytes]:
    data = path.read_bytes()
    rows = zip(listing.label, listing.names, listing.offset, listing.size, strict=True)
    return {
        f"{listing.classes[k].decode()}/{os.fsdecode(name)}": data[offset : offset + size]
        for k, name, offset, size in rows
    }


def in_memory(data: bytes, length: int, offset: int) -> bytes:
    return data[offset : offset + length]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dot", [False, True])
def test_a_tree_of_any_format_is_read(tmp_path: Path, program: str, form: str, dot: bool) -> None:
    tree = make_tree()
    if form != "v7":  # a name of more than 100 bytes: a prefix, a long-name record or a pax path
        tree["n01440764"]["x" * 88 + ".JPEG"] = b"long"
    if form in ("gnu", "posix"):
        tree["n01440764"]["ü" * 60 + "y" * 100 + ".JPEG"] = b"longer"
    write_files(tmp_path / "in", flatten(tree, "train/"))
    pack(program, form, tmp_path / "in", tmp_path / "a.tar", dot)
    listing = list_path(tmp_path / "a.tar")
    assert contents(tmp_path / "a.tar", listing) == flatten(tree)
    names = [os.fsdecode(name) for name in listing.names]
    assert [
        f"{listing.classes[k].decode()}/{n}" for k, n in zip(listing.label, names, strict=True)
    ] == [os.fsdecode(path) for path in sorted(map(os.fsencode, flatten(tree)))]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("form", FORMATS)
def test_class_tars_of_any_format_are_read_in_place(
    tmp_path: Path, program: str, form: str
) -> None:
    tree = make_tree()
    (tmp_path / "outer").mkdir()
    for wnid, files in tree.items():
        write_files(tmp_path / wnid, files)
        pack(program, form, tmp_path / wnid, tmp_path / "outer" / f"{wnid}.tar", dot=True)
    pack(program, form, tmp_path / "outer", tmp_path / "a.tar", dot=True)
    listing = list_path(tmp_path / "a.tar")
    assert contents(tmp_path / "a.tar", listing) == flatten(tree)


def test_both_ways_of_walking_agree_with_tarfile(tmp_path: Path) -> None:
    files = {f"f{i}.JPEG": bytes(i % 1500) for i in range(1, 3000)}
    files["a" * 120] = b"x"
    data = tar_bytes(files)
    (tmp_path / "a.tar").write_bytes(data)
    pread = partial(in_memory, data)
    walked = walk_tar(pread, 0, len(data), "a.tar")
    stepped = list(iter_tar(pread, 0, len(data), "a.tar"))
    with tarfile.open(tmp_path / "a.tar") as tar:
        expected = [(m.name.encode(), m.offset_data, m.size) for m in tar]
    assert list(zip(walked.names, walked.offset, walked.size, strict=True)) == expected
    assert [(entry.name, entry.offset, entry.size) for entry in stepped] == expected


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.text("abcxyzÄ0123._-", min_size=1, max_size=160).filter(lambda n: n not in (".", "..")),
        st.binary(max_size=1600),
        max_size=30,
    ),
    st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
def test_any_tar_of_tarfile_is_walked(files: dict[str, bytes], form: int) -> None:
    data = tar_bytes(files, form)
    walked = walk_tar(partial(in_memory, data), 0, len(data), "a.tar")
    found = {
        name.decode(): data[offset : offset + size]
        for name, offset, size in zip(walked.names, walked.offset, walked.size, strict=True)
    }
    assert found == files


def test_sizes_of_8_gib_and_more_are_read(tmp_path: Path) -> None:
    """Base 256 and the pax size, with a hole for the bytes."""
    size = 9 << 30
    path = tmp_path / "a.tar"
    base256 = b"\x80" + size.to_bytes(11, "big")
    record = b"19 size=%d\n" % size
    with open(path, "wb") as file:
        file.write(header(b"n01/a.JPEG", base256))
        file.seek(size, os.SEEK_CUR)
        file.write(header(b"pax", len(record), b"x", b"ustar\x0000") + pad(record))
        file.write(header(b"n01/b.JPEG", 0, b"0", b"ustar\x0000"))
        file.seek(size, os.SEEK_CUR)
        file.write(header(b"n01/c.JPEG", 3) + pad(b"end") + END)
    listing = list_path(path)
    assert listing.names == [b"a.JPEG", b"b.JPEG", b"c.JPEG"]
    assert listing.size.tolist() == [size, size, 3]
    with open(path, "rb") as file:
        assert os.pread(file.fileno(), 3, int(listing.offset[2])) == b"end"


def test_twelve_octal_digits_and_a_signed_checksum_are_read() -> None:
    first = header(b"n01/a.JPEG", b"000000000003")
    second = bytearray(header("n01/ä.JPEG".encode(), 2))
    signed = sum(b - 256 if b > 127 else b for b in second[:148] + second[156:]) + 8 * 32
    second[148:156] = b"%06o\0 " % signed
    data = first + pad(b"abc") + bytes(second) + pad(b"de") + END
    walked = walk_tar(partial(in_memory, data), 0, len(data), "a.tar")
    assert walked.names == [b"n01/a.JPEG", "n01/ä.JPEG".encode()]
    assert walked.size.tolist() == [3, 2]


def test_a_long_name_goes_with_its_own_file_only() -> None:
    long = b"d/" + b"y" * 150 + b".JPEG"
    data = (
        header(b"././@LongLink", len(long) + 1, b"L") + pad(long + b"\0")
        + header(b"short", 1) + pad(b"1")
        + header(b"d/next.JPEG", 1) + pad(b"2") + END
    )  # fmt: skip
    walked = walk_tar(partial(in_memory, data), 0, len(data), "a.tar")
    assert walked.names == [long, b"d/next.JPEG"]


def test_bytes_after_a_names_nul_are_no_part_of_it() -> None:
    data = header(b"n01/a.JPEG\0junk", 1) + pad(b"1") + END
    assert walk_tar(partial(in_memory, data), 0, len(data), "a").names == [b"n01/a.JPEG"]


def test_the_prefix_field_of_gnu_headers_is_no_name() -> None:
    """Old GNU tar keeps times there (--incremental); only ustar has a prefix."""
    block = bytearray(header(b"n01/a.JPEG", 1))
    block[345:357] = b"13571357135\0"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    data = bytes(block) + pad(b"1") + END
    assert walk_tar(partial(in_memory, data), 0, len(data), "a").names == [b"n01/a.JPEG"]


def test_other_files_are_left_out_and_counted(tmp_path: Path) -> None:
    tree = make_tree(2)
    extra = {"README": b"x", "n01440764/notes.txt": b"y", "n01440764/._n01440764_1.JPEG": b"z"}
    (tmp_path / "a.tar").write_bytes(tar_bytes(flatten(tree) | extra))
    listing = list_path(tmp_path / "a.tar")
    assert contents(tmp_path / "a.tar", listing) == flatten(tree)
    assert listing.num_skipped == 3


def test_a_tar_with_both_splits_gives_the_one_asked_for(tmp_path: Path) -> None:
    train, val = make_tree(2, seed=1), make_tree(2, seed=2)
    prefix = "ILSVRC/Data/CLS-LOC/"
    both = flatten(train, f"{prefix}train/") | flatten(val, f"{prefix}val/")
    (tmp_path / "a.tar").write_bytes(tar_bytes(both))
    assert contents(tmp_path / "a.tar", list_path(tmp_path / "a.tar", "train")) == flatten(train)
    assert contents(tmp_path / "a.tar", list_path(tmp_path / "a.tar", "val")) == flatten(val)


def test_images_in_any_order_of_the_tar_come_in_sample_order(tmp_path: Path) -> None:
    tree = make_tree(5, 20)
    shuffled = list(flatten(tree).items())
    random.Random(0).shuffle(shuffled)
    (tmp_path / "a.tar").write_bytes(tar_bytes(dict(shuffled)))
    found = contents(tmp_path / "a.tar", list_path(tmp_path / "a.tar"))
    assert found == flatten(tree)
    assert list(found) == sorted(flatten(tree))


def test_slow_storage_is_walked_by_many_threads_with_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.tar").write_bytes(nested_bytes(make_tree(40, 8)))
    warm = list_path(tmp_path / "a.tar")
    monkeypatch.setattr(archive, "_COLD_READ_S", 0.0)
    cold = list_path(tmp_path / "a.tar")
    assert cold.names == warm.names
    assert np.array_equal(cold.offset, warm.offset)
