"""The index has the crc32 of every unit, and takes one pass over the tar for it."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import numpy as np
import pytest

from dataset.archive import units
from dataset.archive.index import build_index, find_current
from dataset.archive.index_file import TarIndex, load_index, write_whole
from dataset.archive.unit_sums import PrefixSums, append_zeros, sum_units
from dataset.archive.units import EMPTY, cut_units
from dataset.errors import DataError
from tests.dataset.stream.url_index import LARGE, index, serving_tar
from tests.dataset.tars import TRAIN, flatten, make_tree, nested_bytes, tar_bytes

SMALL = 50_000
TREE = {f"n0144076{c}/{i}.JPEG": os.urandom(3000 + 911 * i) for c in range(3) for i in range(40)}
STRETCH = {**TREE, "notes.bin": os.urandom(3 << 20), "n01440769/1.JPEG": os.urandom(90_000)}
CONTENTS = {
    "class tars": nested_bytes(make_tree()),
    "large class tars": LARGE,
    "tree": tar_bytes(flatten(make_tree())),
    "small units": tar_bytes(TREE),
}


def sum_directly(index: TarIndex, content: bytes, unit_size: int) -> list[int]:
    """What the sums must be: each unit is cut out of the tar."""
    found = cut_units(index.offset, index.size, index.label, index.tar_size, unit_size)
    pairs = zip(found.bounds, found.bounds[1:], found.group.tolist(), strict=False)
    return [0 if group == EMPTY else zlib.crc32(content[a:b]) for a, b, group in pairs]


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
@pytest.mark.parametrize("unit_size", [SMALL, units.UNIT_SIZE])
def test_each_unit_has_its_sum_whether_the_tar_is_here_or_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, unit_size: int
) -> None:
    monkeypatch.setattr(units, "UNIT_SIZE", unit_size)
    (tmp_path / TRAIN).write_bytes(content)
    here, place = build_index(tmp_path / TRAIN, checksums=True)
    assert here.unit_sums is not None
    assert here.unit_sums.values.tolist() == sum_directly(here, content, unit_size)
    with serving_tar(content) as (url, _):
        elsewhere = index(url, tmp_path / "out", checksums=True)
    assert elsewhere.place.read_bytes() == place.read_bytes()


def test_other_files_between_the_images_leave_an_index_of_format_1(tmp_path: Path) -> None:
    (tmp_path / TRAIN).write_bytes(tar_bytes(STRETCH))
    found, place = build_index(tmp_path / TRAIN, checksums=True)
    assert found.unit_sums is None and found.sums is not None
    with np.load(place) as file:
        assert int(file["format"]) == 1
    kept = find_current(tmp_path / TRAIN, index_dir=None, labels=None, checksums=True)
    assert kept is not None, "another pass would bring no more"


def test_an_index_of_format_1_is_read_and_replaced_when_checksums_are_asked_for(
    tmp_path: Path,
) -> None:
    tar = tmp_path / TRAIN
    tar.write_bytes(CONTENTS["tree"])
    place = build_index(tar, checksums=True)[1]
    with np.load(place) as file:
        arrays = {name: file[name] for name in file.files if not name.startswith("unit_")}
    write_whole(arrays | {"format": np.int64(1)}, place)
    older = load_index(place, tar)
    assert older.unit_sums is None and older.sums is not None
    assert find_current(tar, index_dir=None, labels=None, checksums=False) is not None
    assert find_current(tar, index_dir=None, labels=None, checksums=True) is None
    write_whole(arrays, place)  # format 2, and no sums of units
    with pytest.raises(DataError, match="contradicts itself: its checksums of units"):
        load_index(place, tar)
    write_whole(arrays | {"format": np.int64(3)}, place)
    with pytest.raises(DataError, match="has format 3, this code reads 1 and 2"):
        load_index(place, tar)


def test_sums_of_other_units_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tar = tmp_path / TRAIN
    tar.write_bytes(CONTENTS["small units"])
    build_index(tar, checksums=True)
    monkeypatch.setattr(units, "UNIT_SIZE", SMALL)
    assert find_current(tar, index_dir=None, labels=None, checksums=True) is None


def test_a_header_that_the_walk_came_back_to_is_read_again(tmp_path: Path) -> None:
    tar = tmp_path / TRAIN
    tar.write_bytes(content := CONTENTS["tree"])
    found, _ = build_index(tar, checksums=True)
    prefix = PrefixSums()
    prefix.take(content, 0)  # not one position was noted
    with open(tar, "rb") as file:
        places = found.offset, found.size, found.label, found.tar_size
        sums = sum_units(*places, prefix, file.fileno())
    assert sums is not None and found.unit_sums is not None
    assert sums.values.tolist() == found.unit_sums.values.tolist()


def test_many_crcs_are_shifted_at_once() -> None:
    first, second = os.urandom(999), os.urandom(12_345)
    values = np.array([zlib.crc32(first), zlib.crc32(second)], np.uint32)
    lengths = np.array([len(second), 0])
    shifted = append_zeros("crc32", values, lengths).tolist()
    assert shifted[0] ^ zlib.crc32(second) == zlib.crc32(first + second)
    assert shifted[1] == zlib.crc32(second)
