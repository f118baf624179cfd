"""A server that died is found, described and started again; with a stand-in, a process that sleeps.

The real daemons do not crash on command: what is tested here is all that we do around one.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.lifetime import MARK
from tests.cluster.osdf import health, xrootd
from tests.cluster.osdf.layout import SERVERS, Layout


class Sleepers:
    """Processes in the place of the XRootDs: they carry the mark, write a pid and a log."""

    def __init__(self) -> None:
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.mute: set[str] = set()

    def start(self, layout: Layout, server: str) -> None:
        folder = layout.folder / server / "run"
        folder.mkdir(parents=True, exist_ok=True)
        process = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: str(layout.folder)})
        (folder / "xrootd.pid").write_text(f"{process.pid}\n")
        with open(layout.folder / server / "log", "a") as log:
            log.write(f"started as {process.pid}\n")
        self.running[server] = process
        self.mute.discard(server)

    def answer(self, layout: Layout, server: str) -> bool:
        return server not in self.mute and self.running[server].poll() is None

    def kill(self, server: str) -> int:
        process = self.running[server]
        process.kill()
        process.wait()
        return process.pid


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "osdf", 0)


@pytest.fixture
def sleepers(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sleepers]:
    sleepers = Sleepers()
    monkeypatch.setattr(xrootd, "start_server", sleepers.start)
    monkeypatch.setattr(xrootd, "answers", sleepers.answer)
    monkeypatch.setattr(health, "PATIENCE_S", 0.0)
    for server in SERVERS:
        sleepers.start(layout, server)
    yield sleepers
    for server in SERVERS:
        sleepers.kill(server)


@pytest.mark.usefixtures("sleepers")
def test_servers_that_live_and_answer_are_left_alone(layout: Layout) -> None:
    assert health.find_ill(layout) == []


def test_a_server_that_died_is_started_again_and_its_end_is_told(
    layout: Layout, sleepers: Sleepers
) -> None:
    pid = sleepers.kill("cache1")
    assert health.find_ill(layout) == ["cache1"]
    found = health.cure(layout, "cache1")
    assert found is not None
    assert f"XRootD cache1 (process [{pid}]) died and was started again" in found
    assert f"the end of its log:\nstarted as {pid}\n" in found
    assert health.find_ill(layout) == []
    assert health.read_pids(layout, "cache1") == [sleepers.running["cache1"].pid] != [pid]


def test_a_core_file_is_named(layout: Layout, sleepers: Sleepers) -> None:
    core = layout.folder / "origin" / f"core.{sleepers.kill('origin')}"
    core.touch()
    assert f"core: {core}" in (health.cure(layout, "origin") or "")


def test_a_server_that_lives_and_is_silent_is_ended_and_started_again(
    layout: Layout, sleepers: Sleepers
) -> None:
    silent = sleepers.running["cache2"]
    sleepers.mute.add("cache2")
    assert health.find_ill(layout) == ["cache2"]
    assert "did not answer for 0 s" in (health.cure(layout, "cache2") or "")
    assert silent.wait() != 0
    assert health.find_ill(layout) == []


def test_a_server_that_answers_again_is_only_waited_for(layout: Layout, sleepers: Sleepers) -> None:
    assert health.cure(layout, "cache2") is None
    assert sleepers.running["cache2"].poll() is None


def test_a_server_that_a_test_stopped_stays_stopped(layout: Layout, sleepers: Sleepers) -> None:
    health.note_stop(layout, "cache2", is_meant=True)
    sleepers.kill("cache2")
    assert health.find_ill(layout) == []
    health.note_stop(layout, "cache2", is_meant=False)
    assert health.find_ill(layout) == ["cache2"]
