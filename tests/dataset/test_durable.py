"""A file is whole or not there, and a lock has one holder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path

import pytest

from dataset.durable import find_room, lock_file, try_lock, write_all, write_json, writing_whole


def test_a_file_has_its_old_content_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with writing_whole(path) as file:
        file.write(b"half")
        file.flush()
        assert json.loads(path.read_text()) == {"a": 1}
        assert (tmp_path / "x.json.part").read_bytes() == b"half"
    assert path.read_bytes() == b"half"
    assert os.listdir(tmp_path) == ["x.json"]


@pytest.mark.parametrize("is_shared", [False, True])
def test_what_fails_half_way_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, is_shared: bool
) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(KeyError), writing_whole(path, is_shared=is_shared) as file:
        file.write(b"half")
        raise KeyError
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]


def test_two_writers_of_a_shared_file_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with writing_whole(path, is_shared=True) as one, writing_whole(path, is_shared=True) as other:
        one.write(b"one")
        other.write(b"other")
    assert path.read_bytes() == b"one"  # it ended last


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught, writing_whole(tmp_path / "x"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == str(tmp_path / "x")


def test_a_number_that_json_has_not_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        write_json(tmp_path / "x", {"a": float("nan")})
    assert os.listdir(tmp_path) == []


def test_a_lock_has_one_holder_and_is_given_back_at_the_close(tmp_path: Path) -> None:
    first, has_lock = lock_file(tmp_path / "lock")
    assert has_lock
    with pytest.raises(BlockingIOError):
        lock_file(tmp_path / "lock")
    os.close(first)
    second, has_lock = lock_file(tmp_path / "lock")
    assert has_lock
    os.close(second)


def test_a_lock_that_its_holder_removed_meanwhile_is_taken_anew(tmp_path: Path) -> None:
    path, opened = tmp_path / "lock", []

    def open_late(place: Path) -> int:
        fd = os.open(place, os.O_RDWR | os.O_CREAT)
        opened.append(fd)
        if len(opened) == 1:
            path.unlink()  # by the one before, between our opening and our locking
        return fd

    fd, has_lock = lock_file(path, open_late)
    assert has_lock and len(opened) == 2
    assert os.path.samestat(os.fstat(fd), path.stat())
    os.close(fd)


def test_a_file_system_without_locks_is_told_from_a_broken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = errno.ENOLCK

    def fail(fd: int, how: int) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(fcntl, "flock", fail)
    with open(tmp_path / "x", "w") as file:
        assert try_lock(file.fileno()) is False
        number = errno.EIO
        with pytest.raises(OSError):
            try_lock(file.fileno())


def test_writes_that_take_a_part_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []

    def write_some(fd: int, data: bytes) -> int:
        written.append(bytes(data[:3]))
        return len(written[-1])

    monkeypatch.setattr(os, "write", write_some)
    write_all(0, b"12345678")
    write_all(0, memoryview(b"abcd"))
    assert written == [b"123", b"456", b"78", b"abc", b"d"]


def test_the_room_of_a_disk_is_that_of_df(tmp_path: Path) -> None:
    room, disk = find_room(tmp_path), os.statvfs(tmp_path)
    assert room.block == disk.f_frsize
    assert 0 < room.num_bytes <= disk.f_blocks * disk.f_frsize
