"""The fetcher as a process: killed, stopped, orphaned, refused; its keeper goes on or says why."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dataset.errors import DataError, PassingError, UserError
from dataset.stream import keeper
from dataset.stream.arrivals import State
from dataset.stream.keeper import Keeper
from dataset.transfer.journal import CHUNK
from tests.dataset.small_server import Handler
from tests.dataset.stream.streams import (
    CONTENT,
    Gate,
    Stage,
    find_chunk,
    is_alive,
    is_over,
    serving_counted,
    shuffled_needs,
    wait_until,
)
from tests.mounts import mounted

ROOT = Path(__file__).resolve().parents[3]
UNIT = 4 * CHUNK


@contextmanager
def kept(stage: Stage, silent_s: float = 120.0) -> Iterator[Keeper]:
    """A keeper at work; without its fetcher at the end."""
    found = Keeper(stage.spec_path, stage.maps, silent_s)
    found.start()
    try:
        yield found
    finally:
        found.stop()
    assert not is_alive(stage.maps[0].pid)


def count_here(stage: Stage) -> int:
    return int(stage.maps[0].here.sum())


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 20))]
)
def test_kills_at_any_moment_cost_what_was_in_flight_and_no_mark_is_ever_wrong(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "MAX_RESTARTS", 100)
    stage, num_kills, connections = Stage(tmp_path), 3, 2
    moments = sorted(random.Random(seed).randrange(len(CONTENT)) for _ in range(num_kills - 1))
    moments.append(max(moments[-1], 3 * len(CONTENT) // 4))
    with serving_counted(piece_s=0.005) as (url, _, sent):
        stage.make(url, connections=connections)
        with kept(stage) as found:
            while not is_over(stage.maps[0]):
                assert stage.find_wrong_marks() == []
                if moments and sum(sent) > moments[0] and is_alive(stage.maps[0].pid):
                    moments.pop(0)
                    pid, num_before = stage.maps[0].pid, found.num_restarts
                    os.kill(pid, signal.SIGKILL)
                    wait_until(lambda n=num_before: found.num_restarts > n)  # type: ignore[misc]
                    num_sent, num_here = sum(sent), count_here(stage)
            assert stage.maps[0].state is State.WHOLE
            assert found.num_restarts == num_kills
    assert stage.path.read_bytes() == CONTENT
    hedged = (stage.maps[0].tally.twice or {}).get("hedged", 0)
    needed = len(CONTENT) - num_here * CHUNK + connections * UNIT
    assert needed < len(CONTENT), "a start from nothing would be seen"
    assert sum(sent) <= num_sent + needed + hedged
    assert stage.maps[0].tally.fetched <= sum(sent)


def test_a_stopped_fetcher_is_replaced(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    with serving_counted(piece_s=0.01) as (url, _, _):
        stage.make(url)
        with kept(stage, silent_s=1.5) as found:
            wait_until(lambda: count_here(stage) > 0)
            os.kill(stage.maps[0].pid, signal.SIGSTOP)
            wait_until(lambda: is_over(stage.maps[0]))
            assert found.num_restarts >= 1
    assert stage.path.read_bytes() == CONTENT


def test_a_fetcher_that_dies_again_and_again_is_given_up_with_75(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(tmp_path)
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'dataset.stream.fetcher' in sys.orig_argv: os._exit(1)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    stage.make("http://127.0.0.1:1/object.bin")
    with kept(stage) as found:
        wait_until(lambda: is_over(stage.maps[0]))
        assert found.num_restarts == 3
    failure = stage.maps[0].failure
    assert isinstance(failure, PassingError)
    assert "died 4 times; the last one crashed (exit 1)" in str(failure)


def test_a_fetcher_that_cannot_be_started_leaves_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(tmp_path)
    stage.make("http://127.0.0.1:1/object.bin")
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    with kept(stage):
        wait_until(lambda: is_over(stage.maps[0]))
    failure = stage.maps[0].failure
    assert isinstance(failure, PassingError) and "cannot be started" in str(failure)


def test_a_fetcher_that_says_why_it_ends_is_not_started_again(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    with serving_counted(CONTENT[:-1]) as (url, _, _):
        stage.make(url)
        with kept(stage) as found:
            wait_until(lambda: is_over(stage.maps[0]))
            assert found.num_restarts == 0
    assert isinstance(stage.maps[0].failure, DataError)


def test_a_full_disk_is_one_line_and_exit_2(tmp_path: Path) -> None:
    stage, gate, needs = Stage(tmp_path), Gate(), shuffled_needs()

    def hold(handler: Handler) -> bool:
        chunk = find_chunk(handler)
        if chunk is not None and needs[chunk] > 50:
            gate.hold()
        return False

    with serving_counted(misbehave=hold) as (url, _, _), mounted(tmp_path / "data", "size=48m"):
        stage.make(url, needs)
        with kept(stage) as found:
            wait_until(lambda: gate.num_held > 0)
            (tmp_path / "data" / "other").write_bytes(bytes(30 * CHUNK))
            gate.is_open.set()
            wait_until(lambda: is_over(stage.maps[0]))
            assert found.num_restarts == 0
        failure = stage.maps[0].failure
        assert isinstance(failure, UserError) and "No space left" in str(failure)
        assert "\n" not in str(failure) and stage.find_wrong_marks() == []


PARENT = """
    import sys, time
    from pathlib import Path
    from dataset.stream.arrivals import ArrivalMap
    from dataset.stream.keeper import Keeper
    keeper = Keeper(Path(sys.argv[1]), [ArrivalMap(Path(sys.argv[2]))])
    keeper.start()
    time.sleep(300)
"""


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM])
def test_a_fetcher_dies_with_its_parent(sig: signal.Signals, tmp_path: Path) -> None:
    stage, gate = Stage(tmp_path), Gate()

    def hold(handler: Handler) -> bool:
        gate.hold()
        return False

    with serving_counted(misbehave=hold) as (url, _, _):
        stage.make(url)
        command = [sys.executable, "-c", textwrap.dedent(PARENT), str(stage.spec_path)]
        parent = subprocess.Popen([*command, str(stage.maps[0].path)], cwd=ROOT)
        wait_until(lambda: gate.num_held > 0)
        pid = stage.maps[0].pid
        assert is_alive(pid)
        parent.send_signal(sig)
        parent.wait()
        wait_until(lambda: not is_alive(pid))
        gate.is_open.set()


def test_stop_ends_the_fetcher_and_keeps_what_arrived(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    with serving_counted(piece_s=0.005) as (url, _, sent):
        stage.make(url)
        with kept(stage) as found:
            wait_until(lambda: count_here(stage) > 3)
        found.stop()  # once more does no harm
        assert stage.maps[0].state is State.COMING and found.num_restarts == 0
        num_here, num_sent = count_here(stage), sum(sent)
        with kept(stage):
            wait_until(lambda: is_over(stage.maps[0]))
    in_flight = 4 * UNIT  # what was still on its way when they were counted
    assert sum(sent) - num_sent <= len(CONTENT) - num_here * CHUNK + in_flight + 2
    assert stage.path.read_bytes() == CONTENT
