"""Processes find a stream only while somebody keeps it."""

from __future__ import annotations

import copy
import os
import signal
import tempfile
from multiprocessing import Pipe
from pathlib import Path

import pytest

from dataset.stream.meeting import Owner, meet
from dataset.stream.node_folder import PREFIX

URL = "https://example.org/a.tar?authz=secret"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix=PREFIX, dir=tmp_path))


def test_a_stream_is_found_by_its_url_while_it_is_kept(folder: Path, tmp_path: Path) -> None:
    with meet(tmp_path / "data") as meeting:
        assert meeting.find(URL) is None
        owner = Owner.become(folder)
        meeting.tell(URL, folder)
    with meet(tmp_path / "data") as meeting:
        assert meeting.find(URL) == folder and meeting.find("https://other") is None
        owner.resign()
        assert meeting.find(URL) is None and not folder.exists()
    told = (tmp_path / "data" / ".stream.json").read_text()
    assert "secret" not in told


def test_another_process_knows_whether_the_owner_lives(folder: Path) -> None:
    here, there = Pipe()
    pid = os.fork()
    if not pid:  # it keeps the stream until it is killed
        Owner.become(folder)
        there.send("kept")
        signal.pause()
    assert here.recv() == "kept"
    assert Owner(folder).is_alive() and not Owner(folder).is_me
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert not Owner(folder).is_alive()


def test_a_fork_of_the_owner_is_not_the_owner_and_takes_nothing_from_it(folder: Path) -> None:
    owner = Owner.become(folder)
    assert copy.deepcopy(owner).is_alive()
    pid = os.fork()
    if not pid:
        is_right = owner.is_alive() and not owner.is_me
        owner.resign()
        os._exit(0 if is_right and Owner(folder).is_alive() else 1)
    assert os.waitpid(pid, 0)[1] == 0
    owner.resign()
    assert not owner.is_alive()
