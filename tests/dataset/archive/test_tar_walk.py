"""A tar walked from many places at once gives what one walk gives, whatever its files hold."""

from __future__ import annotations

import random
import tarfile
from functools import partial

import pytest

from dataset.archive import tar_walk
from dataset.archive.tar_walk import Entries, walk_tar, walk_tar_in_parts
from dataset.errors import DataError
from tests.dataset.tars import header, pad, tar_bytes

Fact = tuple[bytes, int, int]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar_walk, "_MIN_PART", 2048)


class Counted:
    """Bytes in memory, and the places that were read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.places: list[int] = []

    def pread(self, length: int, offset: int) -> bytes:
        self.places.append(offset)
        return self.data[offset : offset + length]


def facts(entries: Entries) -> list[Fact]:
    return list(zip(entries.names, entries.offset.tolist(), entries.size.tolist(), strict=True))


def both(data: bytes, threads: int = 16) -> tuple[list[Fact], list[Fact]]:
    pread = Counted(data).pread
    return (
        facts(walk_tar_in_parts(pread, len(data), "a.tar", threads)),
        facts(walk_tar(pread, 0, len(data), "a.tar")),
    )


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("seed", range(8))
def test_parts_give_the_same_as_one_walk(form: int, seed: int) -> None:
    chance = random.Random(seed)
    files = {
        f"{'long' * chance.choice((0, 0, 40))}{i}.JPEG": chance.randbytes(chance.randrange(4000))
        for i in range(200)
    }
    parts, whole = both(tar_bytes(files, form))
    assert parts == whole
    assert len(whole) == 200


@pytest.mark.parametrize("seed", range(8))
def test_pictures_of_headers_inside_files_do_not_mislead(seed: int) -> None:
    """Files that are tars themselves: every cut may fall on a header that is none."""
    chance = random.Random(seed)
    fake = header(b"fake.JPEG", 100) + pad(b"x" * 100)
    files = {f"{i}.JPEG": fake * chance.randrange(1, 40) for i in range(60)}
    parts, whole = both(tar_bytes(files))
    assert parts == whole
    assert len(whole) == 60


def test_the_parts_are_really_walked_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(tar_bytes({f"{i}.JPEG": bytes([1]) * 2000 for i in range(400)}))
    walked = []

    def note(pread: object, start: int, *rest: object, **stop: object) -> object:
        walked.append(start)
        return walk_tar(pread, start, *rest, **stop)  # type: ignore[arg-type]

    monkeypatch.setattr(tar_walk, "walk_tar", note)
    walk_tar_in_parts(counted.pread, len(counted.data), "a.tar", 8)
    assert len(walked) == 8
    assert max(walked) > len(counted.data) * 3 // 4


@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
def test_damage_is_found_and_placed_as_by_one_walk(place: float) -> None:
    data = bytearray(tar_bytes({f"{i}.JPEG": bytes([1]) * 2000 for i in range(400)}))
    victim = walk_tar(partial(_read, bytes(data)), 0, len(data), "a").offset[int(400 * place)]
    data[victim - 512 + 3] ^= 1
    with pytest.raises(DataError, match=f"header at byte {victim - 512} has a wrong checksum"):
        walk_tar_in_parts(partial(_read, bytes(data)), len(data), "a.tar", 8)


def test_a_truncated_tar_is_refused() -> None:
    data = tar_bytes({f"{i}.JPEG": bytes([1]) * 2000 for i in range(400)})[:-30_000]
    with pytest.raises(DataError, match="truncated"):
        walk_tar_in_parts(partial(_read, data), len(data), "a.tar", 8)


def _read(data: bytes, length: int, offset: int) -> bytes:
    return data[offset : offset + length]
