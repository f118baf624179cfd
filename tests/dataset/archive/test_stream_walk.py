"""A walk from front to back finds what a walk over a file finds, in one go or in many."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from dataset.archive.index import build_index, check_kind
from dataset.archive.index_file import pack_listing
from dataset.archive.labels import label_val
from dataset.archive.listing import Listing, Split
from dataset.archive.stream_walk import StreamWalk
from dataset.archive.tar_header import BLOCK
from dataset.archive.tar_images import list_tar, read_kind
from dataset.errors import CommandError
from tests.dataset.bad_tars import BAD
from tests.dataset.tars import (
    TRAIN,
    flatten,
    make_tree,
    nested_bytes,
    pack,
    tar_bytes,
    write_files,
    write_flat,
)

LONG = {f"{'long' * 40}/n01440764/{'name' * 40}_{i}.JPEG": bytes([i + 1]) * 700 for i in range(4)}
MIXED = {"._n01440764.tar": b"hidden", "readme.txt": b"text"} | {
    f"{wnid}.tar": tar_bytes(files | {"notes.txt": b"text"}) for wnid, files in make_tree().items()
}
TARS = {
    "class tars": nested_bytes(make_tree()),
    "class tars in pax": nested_bytes(make_tree(), tarfile.PAX_FORMAT),
    "tree": tar_bytes(flatten(make_tree())),
    "two splits": tar_bytes(flatten(make_tree(), "a/train/") | flatten(make_tree(2), "a/val/")),
    "long GNU names": tar_bytes(LONG),
    "long pax names": tar_bytes(LONG, tarfile.PAX_FORMAT),
    "hidden files and others": tar_bytes(dict(reversed(MIXED.items()))),
}


class Forward:
    """Reads at positions that only grow; anything else is a fault of the walk."""

    def __init__(self, data: bytes) -> None:
        self._data, self._position = data, 0

    def pread(self, length: int, offset: int) -> bytes:
        assert offset >= self._position
        self._position = offset
        return self._data[offset : offset + length]


class Interrupted(Exception):
    """As a kill between two entries."""


def interrupt() -> None:
    raise Interrupted


def walk_at_once(data: bytes, path: Path) -> StreamWalk:
    walk = StreamWalk(path, len(data))
    walk.run(Forward(data).pread, lambda: None)
    return walk


def walk_in_steps(data: bytes, path: Path) -> StreamWalk:
    """Each entry by a walk of its own, from what the one before saved."""
    walk, num_starts = StreamWalk(path, len(data)), 0
    while True:
        try:
            walk.run(Forward(data).pread, interrupt)
            return walk
        except Interrupted:
            num_starts += 1
            assert num_starts < 1000
            saved = walk.pack()
            walk = StreamWalk(path, len(data))
            walk.unpack(saved)


def list_file(path: Path, split: Split) -> Listing:
    with open(path, "rb") as file:
        return list_tar(file.fileno(), path, split, partial(label_val, archive=path))


def flat(listing: Listing) -> dict[str, list[int]]:
    packed = pack_listing(listing, 1, None, "x")
    return {name: array.tolist() for name, array in packed.items()} | {
        "last": [listing.last_header, listing.num_skipped, *listing.row.tolist()]
    }


@pytest.mark.parametrize("walk", [walk_at_once, walk_in_steps])
@pytest.mark.parametrize("name", TARS)
def test_a_stream_is_listed_as_the_file_is(
    tmp_path: Path, name: str, walk: Callable[[bytes, Path], StreamWalk]
) -> None:
    path = tmp_path / TRAIN
    path.write_bytes(TARS[name])
    walked = walk(TARS[name], path)
    found = walked.list_images("train", partial(label_val, archive=path))
    expected = list_file(path, "train")
    assert flat(found) == flat(expected)
    end = expected.last_header
    assert walked.last_header == TARS[name][end : end + BLOCK]


def test_a_flat_stream_is_labelled_as_the_file_is(tmp_path: Path) -> None:
    path, _ = write_flat(tmp_path)
    walked = walk_at_once(path.read_bytes(), path)
    found = walked.list_images("val", partial(label_val, archive=path))
    assert flat(found) == flat(list_file(path, "val"))


@pytest.mark.parametrize("program", ["tar", "bsdtar"])
@pytest.mark.parametrize("form", ["gnu", "posix", "ustar"])
def test_what_tar_programs_write_is_walked(tmp_path: Path, program: str, form: str) -> None:
    write_files(tmp_path / "in", flatten(make_tree()))
    pack(program, form, tmp_path / "in", tmp_path / TRAIN, dot=True)
    data = (tmp_path / TRAIN).read_bytes()
    found = walk_in_steps(data, tmp_path / TRAIN).list_images("train", lambda names: [])
    assert flat(found) == flat(list_file(tmp_path / TRAIN, "train"))


@pytest.mark.parametrize("case", BAD)
def test_a_bad_tar_is_refused_with_the_same_code(tmp_path: Path, case: str) -> None:
    make, words = BAD[case]
    path, data = tmp_path / TRAIN, make()
    path.write_bytes(data)
    with pytest.raises(CommandError) as of_file:
        build_index(path)
    with pytest.raises(CommandError, match=words) as of_stream:
        check_kind(read_kind(data[:BLOCK], path), path)
        walked = walk_at_once(data, path)
        walked.list_images("train", partial(label_val, archive=path))
    assert of_stream.value.exit_code == of_file.value.exit_code
    assert "\n" not in str(of_stream.value)


def test_an_image_larger_than_any_buffer_is_passed_over() -> None:
    files = {"n01440764/a.JPEG": os.urandom(3 << 20), "n01440764/b.JPEG": b"b"}
    data = tar_bytes(files)
    found = walk_at_once(data, Path(TRAIN)).list_images("train", lambda names: [])
    stream = io.BytesIO(data)
    for offset, size, content in zip(found.offset, found.size, files.values(), strict=True):
        stream.seek(offset)
        assert stream.read(size) == content
