"""Tests write into memory only where it has room for them, and where what they write can run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.memory_folder import MIN_FREE_BYTES, VARIABLE, has_room, use_memory


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What statvfs tells of any folder: by default one with room enough."""
    told = {"free": MIN_FREE_BYTES, "flag": 0}

    def statvfs(path: object) -> os.statvfs_result:
        return os.statvfs_result((4096, 4096, *[told["free"] // 4096] * 6, told["flag"], 255))

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr("tests.memory_folder._find_free_memory", lambda: MIN_FREE_BYTES)
    return told


def test_a_folder_with_room_is_used(disk: dict[str, int], tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    use_memory(environ, tmp_path)
    assert environ == {VARIABLE: str(tmp_path)}


def test_the_users_own_place_stays(disk: dict[str, int], tmp_path: Path) -> None:
    environ = {VARIABLE: "/scratch"}
    use_memory(environ, tmp_path)
    assert environ == {VARIABLE: "/scratch"}


@pytest.mark.parametrize("what", [{"free": MIN_FREE_BYTES - 4096}, {"flag": os.ST_NOEXEC}])
def test_one_that_is_full_or_runs_nothing_is_not(
    what: dict[str, int], disk: dict[str, int], tmp_path: Path
) -> None:
    disk |= what
    assert not has_room(tmp_path)


def test_nor_is_one_beyond_the_free_memory(
    disk: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.memory_folder._find_free_memory", lambda: MIN_FREE_BYTES - 1)
    assert not has_room(tmp_path)


def test_nor_one_that_is_not_there(tmp_path: Path) -> None:
    assert not has_room(tmp_path / "none")
