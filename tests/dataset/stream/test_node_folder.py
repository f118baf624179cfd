"""The temporary folder of a stream: removed at the end, and after a kill by the next run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dataset.stream.node_folder import NEW_S, NodeFolder


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("_CONDOR_SCRATCH_DIR", str(tmp_path))
    return tmp_path


def leave(folder: Path, age_s: float) -> Path:
    """The folder of a run that was killed some time ago."""
    folder.mkdir()
    (folder / "held").touch()
    (folder / "train.map").touch()
    then = folder.stat().st_mtime - age_s
    os.utime(folder, (then, then))
    return folder


def test_a_folder_goes_with_its_run(place: Path) -> None:
    folder = NodeFolder()
    assert folder.path.parent == place and folder.path.is_dir()
    folder.close()
    assert list(place.iterdir()) == []
    other = os.open(place, os.O_RDONLY)  # perhaps with the number of the folder's lock
    folder.close()
    os.close(other)


def test_what_a_killed_run_left_is_removed_and_nothing_else(place: Path) -> None:
    running = NodeFolder()
    old = running.path.stat().st_mtime - 2 * NEW_S
    os.utime(running.path, (old, old))
    killed = leave(place / "trainyard-stream-killed", 2 * NEW_S)
    young = leave(place / "trainyard-stream-young", 0)
    others = leave(place / "somebody-else", 2 * NEW_S)
    NodeFolder().close()
    assert not killed.exists()
    assert young.exists() and others.exists() and (running.path / "held").exists()
    running.close()
