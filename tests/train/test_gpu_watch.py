"""A rank that hangs or dies on GPUs is named, though the main thread waits in a full queue."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dataset.errors import CRASH
from tests.gpu_sim import ranks as gpu_ranks
from tests.train import hooks
from train.records.record import read_run

pytestmark = [pytest.mark.gpusim, pytest.mark.timeout(300)]

# Nothing is computed, and the host runs at most so many launches ahead of the GPU.
FULL_QUEUE = {"CUDASIM_MODE": "shape", "CUDASIM_QUEUE": 300}
HANG = partial(time.sleep, 300)
LONG = ["--epochs", "1", "--timeout-minutes", "2"]  # a busy machine may take long for a step


def hasten(flag: Path) -> None:
    """Once the file is there the ranks lose patience sooner than their timeout."""
    from train.ranks.watch import Judge

    plain = Judge.judge

    def judge(self: Judge, *args: Any) -> str:
        if flag.exists():
            self._timeout_s, self._look_every_s = 15.0, 5.0
            self._standstill_s = self._standstill_s and 20.0
        return plain(self, *args)

    Judge.judge = judge  # type: ignore[method-assign,assignment]


IN_TRAINING, IN_EVALUATION = partial(hooks.at_step, 1, 3), partial(hooks.at_validation, 1, 2)
HUNG = (HANG, "rank 1 (reading data) hangs: it answers", CRASH)
KILLED = (hooks.kill_myself, "lost contact with rank 1", -signal.SIGKILL)


@pytest.mark.parametrize(
    ("where", "action", "words", "code"),
    [
        (IN_TRAINING, *HUNG),
        (IN_TRAINING, *KILLED),
        (IN_EVALUATION, *HUNG),
        pytest.param(IN_EVALUATION, *KILLED, marks=pytest.mark.soak),
    ],
)
def test_a_rank_that_hangs_or_dies_on_gpus_is_named(
    images: Path,
    tmp_path: Path,
    where: Callable[..., None],
    action: Callable[[], None],
    words: str,
    code: int,
) -> None:
    out = tmp_path / "out"
    argv = [str(images), "--microbatch", "4", *LONG]
    flag = tmp_path / "flag"
    act = partial(hooks.all_of, flag.touch, action)
    job = gpu_ranks.run(
        [*argv, "--output", str(out)],
        tmp_path / "log",
        2,
        settings=FULL_QUEUE,
        hook=partial(hooks.all_of, partial(hasten, flag), partial(where, act)),
    )
    assert job.codes == [CRASH, code], job.log
    assert words in job.log
    assert "Traceback" not in job.log
    assert (read_run(out)["status"], read_run(out)["exit_code"]) == ("failed", CRASH)


def test_gpus_that_all_stand_still_are_recorded_as_a_failure(images: Path, tmp_path: Path) -> None:
    """From step 3 on collectives never end: all hosts came equally far."""
    out = tmp_path / "out"
    argv = [str(images), *LONG, "--output", str(out)]
    flag = tmp_path / "flag"
    stop = partial(hooks.all_of, flag.touch, partial(os.putenv, "NCCLSIM_US", "300000000"))
    hook = partial(
        hooks.all_of,
        partial(hasten, flag),
        *(partial(hooks.at_step, rank, 3, stop) for rank in (0, 1)),
    )
    job = gpu_ranks.run(argv, tmp_path / "log", 2, settings=FULL_QUEUE, hook=hook)
    assert job.codes == [CRASH, CRASH]
    assert "no rank made progress" in job.log
    assert read_run(out)["status"] == "failed"
