"""Who is named when the ranks stand still, judged from made-up beats; and on real ranks."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

from dataset.errors import CRASH
from tests.train import hooks
from tests.train import started_ranks as ranks
from train.ranks.watch import READING, Beat, Judge, unpack_beat
from train.records.record import read_run

TIMEOUT_S, STANDSTILL_S = 100.0, 130.0


def watch(
    ranks_at: dict[int, list[tuple[int, str]]],
    *,
    silent: tuple[int, ...] = (),
    standstill_s: float | None = STANDSTILL_S,
) -> list[str]:
    """What rank 0 finds out, second by second; the list of a rank is what it does each 10 s."""
    judge = Judge(TIMEOUT_S, standstill_s)
    verdicts = []
    for now in range(200):
        at = {rank: places[min(now // 10, len(places) - 1)] for rank, places in ranks_at.items()}
        beats = [
            Beat(*at[rank], "dead" if rank in silent else str(now)) for rank in sorted(ranks_at)
        ]
        verdicts.append(judge.judge(float(now), at[0][0], partial(list, beats)))
    return verdicts


def first(verdicts: list[str]) -> tuple[int, str]:
    """When something was found, and what."""
    return next(((now, text) for now, text in enumerate(verdicts) if text), (-1, ""))


def test_a_silent_rank_is_lost_long_before_the_timeout() -> None:
    at, text = first(watch({0: [(5, "training")], 1: [(5, "training")]}, silent=(1,)))
    assert text == "lost contact with rank 1"
    assert at < TIMEOUT_S


def test_a_rank_that_stands_behind_hangs_only_after_the_timeout() -> None:
    at, text = first(watch({0: [(6, "training")], 1: [(5, READING)], 2: [(6, "training")]}))
    assert text.startswith("rank 1 (reading data) hangs: it answers")
    assert at >= TIMEOUT_S


def test_a_slow_rank_that_still_moves_does_not_hang() -> None:
    slow = [(number, "training") for number in range(1, 30)]
    assert first(watch({0: [(99, "training")], 1: slow})) == (-1, "")


def test_ranks_that_come_further_are_not_judged() -> None:
    moving = [(number, "training") for number in range(1, 30)]
    assert first(watch({0: moving, 1: [(0, "training")]}, silent=(1,))) == (-1, "")


def test_a_standstill_of_all_gpus_is_said_but_not_one_of_the_storage() -> None:
    stuck, reading = [(5, "training")], [(5, READING)]
    at, text = first(watch({0: stuck, 1: stuck}))
    assert "no rank made progress" in text and at >= STANDSTILL_S
    assert first(watch({0: reading, 1: reading})) == (-1, "")
    assert first(watch({0: stuck, 1: stuck}, standstill_s=None)) == (-1, "")


def test_a_beat_survives_the_store() -> None:
    beat = Beat(7, READING, "12.5")
    assert unpack_beat(beat.pack().encode()) == beat


@pytest.mark.training
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_in_an_evaluation_is_named(
    images: Path, tmp_path: Path, rank: int
) -> None:
    hook = partial(hooks.at_validation, rank, 1, partial(time.sleep, 100))
    argv = [str(images), "--epochs", "1", "--microbatch", "4", "--timeout-minutes", "0.2"]
    job = ranks.run([*argv, "--output", str(tmp_path / "out")], tmp_path / "log", 2, hook=hook)
    assert job.codes == [CRASH, CRASH]
    assert f"rank {rank} (reading data) hangs: it answers" in job.log
    assert read_run(tmp_path / "out")["status"] == "failed"
