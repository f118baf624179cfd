"""Every damaged or hostile archive is refused with one line that says what and where."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from dataset.archive.extract import Extraction, extract_archive
from dataset.archive.index import build_index
from dataset.archive.tar_images import detect_kind, list_tar
from dataset.errors import CommandError, DataError
from tests.dataset.bad_tars import BAD, GOOD
from tests.dataset.tars import TRAIN, flatten, make_tree, read_tree


def everything_below(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*")]


@pytest.mark.parametrize("case", BAD)
def test_a_bad_archive_is_not_extracted(tmp_path: Path, case: str) -> None:
    make, words = BAD[case]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / TRAIN).write_bytes(make())
    with pytest.raises(CommandError, match=words) as caught:
        extract_archive(Extraction(tmp_path / "in" / TRAIN, "train", tmp_path / "out"))
    assert caught.value.exit_code in (2, 3)
    assert "\n" not in str(caught.value)
    assert set(everything_below(tmp_path)) <= {"in", "out", f"in/{TRAIN}"}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_archive_is_not_extracted_from_a_gzip(tmp_path: Path, case: str) -> None:
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(BAD[case][0]()))
    with pytest.raises(CommandError) as caught:
        extract_archive(Extraction(tmp_path / "a.tar.gz", "train", tmp_path / "out"))
    assert caught.value.exit_code in (2, 3)
    assert "\n" not in str(caught.value)
    assert read_tree(tmp_path / "out" / "train") == {}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_archive_is_not_indexed(tmp_path: Path, case: str) -> None:
    make, words = BAD[case]
    (tmp_path / TRAIN).write_bytes(make())
    with pytest.raises(CommandError, match=words) as caught:
        build_index(tmp_path / TRAIN)
    assert caught.value.exit_code in (2, 3)
    assert everything_below(tmp_path) == [TRAIN]


def test_any_flipped_bit_of_a_header_is_found(tmp_path: Path) -> None:
    """Only another spelling of the same checksum (a space for a leading zero) may pass."""
    path = tmp_path / TRAIN
    path.write_bytes(GOOD)
    good = _list(path)
    for position in range(1024):
        is_number = 124 <= position % 512 < 160  # size, checksum, type
        for bit in range(8) if is_number else range(position % 8, 8, 24):
            changed = bytearray(GOOD)
            changed[position] ^= 1 << bit
            path.write_bytes(changed)
            try:
                names = _list(path)
            except DataError:
                continue
            assert position % 512 in (148, 154, 155)
            assert names == good


def test_a_tar_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / TRAIN
    end = len(GOOD.rstrip(b"\0"))
    for length in range(0, end, 311):
        path.write_bytes(GOOD[:length])
        with pytest.raises(DataError):
            _list(path)


def test_keep_going_leaves_out_the_bad_class_and_still_fails(tmp_path: Path) -> None:
    tree = make_tree(3)
    damaged = bytearray(GOOD)
    second = damaged.index(b"n01441875.tar") + 512
    damaged[second + 5] ^= 1
    path = tmp_path / TRAIN
    path.write_bytes(damaged)
    job = Extraction(path, "train", tmp_path / "out", keep_going=True)
    with pytest.raises(DataError, match=r"1 problem.*n01441875"):
        extract_archive(job)
    del tree["n01441875"]
    assert read_tree(tmp_path / "out" / "train") == flatten(tree)
    assert not list((tmp_path / "out").glob(".train.extracted.json"))


def _list(path: Path) -> list[bytes]:
    detect_kind(path)
    fd = os.open(path, os.O_RDONLY)
    try:
        return list_tar(fd, path, "train", lambda names: []).names
    finally:
        os.close(fd)
