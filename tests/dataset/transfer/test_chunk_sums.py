"""Block checksums out of a real TAR.index without numpy, and hashes that follow the file."""

from __future__ import annotations

import hashlib
import io
import os
import random
import tarfile
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from dataset import checksum
from dataset.archive.index import build_index, find_index
from dataset.transfer.chunk_sums import (
    ChunkSums,
    NoChecks,
    NoIndex,
    OtherTar,
    PrefixHash,
    hash_file,
    read_block_checks,
)
from dataset.transfer.journal import CHUNK
from tests.dataset.object_fetch import make_index


def make_indexed_tar(folder: Path, num_bytes: int = 9 * CHUNK) -> Path:
    """A tar of one class tar with one image, indexed with checksums by the project's own code."""
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w") as class_tar:
        info = tarfile.TarInfo("n01440764_1.JPEG")
        info.size = num_bytes
        class_tar.addfile(info, io.BytesIO(os.urandom(num_bytes)))
    tar = folder / "ILSVRC2012_img_train.tar"
    with tarfile.open(tar, mode="w") as outer:
        info = tarfile.TarInfo("n01440764.tar")
        info.size = len(inner.getvalue())
        outer.addfile(info, io.BytesIO(inner.getvalue()))
    build_index(tar, checksums=True)
    return tar


def test_the_index_of_this_project_is_read_without_numpy(tmp_path: Path) -> None:
    tar = make_indexed_tar(tmp_path)
    index = find_index(tar)
    assert index is not None
    checks = read_block_checks(index, tar.stat().st_size)
    blocks = [tar.read_bytes()[at : at + CHUNK] for at in range(0, tar.stat().st_size, CHUNK)]
    assert checks.kind == "crc32"
    assert list(checks.values) == [checksum.compute("crc32", block) for block in blocks]
    assert [checks.block_of(chunk) for chunk in range(10)] == list(range(10))
    assert checks.chunks_of(9, 10) == range(9, 10)


def test_an_index_of_an_earlier_version_is_read_too(tmp_path: Path) -> None:
    content = os.urandom(9 * CHUNK + 5)
    checks = read_block_checks(make_index(tmp_path, content), len(content))
    blocks = [content[at : at + 4 * CHUNK] for at in range(0, len(content), 4 * CHUNK)]
    assert checks.kind == "crc32c"
    assert list(checks.values) == [checksum.compute("crc32c", block) for block in blocks]
    assert [checks.block_of(chunk) for chunk in range(10)] == [0] * 4 + [1] * 4 + [2] * 2
    assert checks.chunks_of(2, 10) == range(8, 10)


@pytest.mark.parametrize(
    ("arrays", "kind", "reason"),
    [
        ({"tar_size": np.int64(5)}, NoChecks, "no block checksums"),
        ({"tar_size": np.int64(6), "block_size": np.int64(CHUNK)}, OtherTar, "the object has"),
        ({"tar_size": np.int64(5), "block_size": np.int64(1000)}, NoChecks, "whole MiB"),
    ],
)
def test_an_index_that_does_not_fit_is_refused_and_said(
    tmp_path: Path, arrays: dict[str, np.int64], kind: type[NoChecks], reason: str
) -> None:
    path = tmp_path / "x.index"
    if "block_size" in arrays:
        arrays = {**arrays, "block_crc32c": np.array([1], np.uint32)}  # type: ignore[dict-item]
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    with pytest.raises(NoChecks, match=reason) as caught:
        read_block_checks(path, 5)
    assert caught.type is kind


def test_a_file_that_is_no_index_is_said(tmp_path: Path) -> None:
    (tmp_path / "x.index").write_bytes(b"<html>")
    with pytest.raises(NoChecks, match="cannot be read"):
        read_block_checks(tmp_path / "x.index", 5)
    with pytest.raises(NoIndex, match="no file none"):
        read_block_checks(tmp_path / "none", 5)


def test_without_the_crc32c_package_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = make_index(tmp_path, bytes(1000))
    monkeypatch.setattr(checksum, "HAS_CRC32C", False)
    with pytest.raises(NoChecks, match="not installed"):
        read_block_checks(index, 1000)


def test_the_sums_of_today_need_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tar = make_indexed_tar(tmp_path, 1000)
    index = find_index(tar)
    assert index is not None
    monkeypatch.setattr(checksum, "HAS_CRC32C", False)
    assert len(read_block_checks(index, tar.stat().st_size).values) == 1


def test_a_hash_follows_a_growing_prefix(tmp_path: Path) -> None:
    content = os.urandom(2 * CHUNK + 77)
    (tmp_path / "x").write_bytes(content)
    fd = os.open(tmp_path / "x", os.O_RDONLY)
    follower = PrefixHash(fd, ["md5", "sha256", "crc32"])
    for end in (CHUNK, CHUNK, len(content)):
        follower.advance(end)
    assert follower.hexdigests() == {
        "md5": hashlib.md5(content).hexdigest(),
        "sha256": hashlib.sha256(content).hexdigest(),
        "crc32": f"{zlib.crc32(content):08x}",
    }
    assert hash_file(fd, "md5", len(content)) == hashlib.md5(content).hexdigest()
    os.close(fd)


def test_the_checksum_of_the_whole_comes_from_its_chunks() -> None:
    content = os.urandom(2 * CHUNK + 77)
    sums = ChunkSums(("crc32", "adler32"), len(content), 3)
    for chunk in range(3):
        piece = content[chunk * CHUNK : (chunk + 1) * CHUNK]
        sums.set(chunk, (zlib.crc32(piece), zlib.adler32(piece)))
    assert sums.of_chunks("crc32", range(3)) == zlib.crc32(content)
    assert sums.of_chunks("adler32", range(3)) == zlib.adler32(content)


def make_npy(head: bytes, data: bytes) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + data


INTEGER = make_npy(b"{'descr': '<i8', 'shape': (), }", (5).to_bytes(8, "little"))
HOSTILE_ARRAYS = {
    "empty": b"",
    "short": b"\x93NUMPY\x01\x00\xff",
    "deep": make_npy(b"(" * 60_000, b""),
    "no dict": make_npy(b"[1]", b""),
    "objects": make_npy(b"{'descr': '|O'}", b"x"),
    "odd length": make_npy(b"{'descr': '<u4'}", b"xyz"),
    "a bomb": make_npy(b"{'descr': '<u4'}", bytes(4 << 20)),
}


@pytest.mark.parametrize("name", HOSTILE_ARRAYS)
def test_a_hostile_index_is_passed_over(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.index"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("block_size.npy", INTEGER)
        archive.writestr("tar_size.npy", INTEGER)
        archive.writestr("block_crc32c.npy", HOSTILE_ARRAYS[name])
    with pytest.raises(NoChecks, match=r"cannot be read|whole MiB"):
        read_block_checks(path, 5)


def test_any_damage_of_an_index_is_passed_over_or_changes_nothing_but_sums(tmp_path: Path) -> None:
    tar = make_indexed_tar(tmp_path, 1000)
    index = find_index(tar)
    assert index is not None
    content, chance = index.read_bytes(), random.Random(1)
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(chance.randint(1, 8)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        index.write_bytes(damaged)
        with suppress(NoChecks):
            assert len(read_block_checks(index, tar.stat().st_size).values) == 1
