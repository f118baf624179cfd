"""Moments of a search at which a test kills it: each is an event that the search's folder shows.

A training that has reached its pause waits before its next epoch, while a file exists: so a kill at
that moment always meets a search that is not over, however slow or fast the machine is.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from report.search.trials import TRIAL_FILE, name_trial, read_trial
from train.records.record import read_epochs

POLL_S = 0.01
Task = Callable[[], None]


@dataclass(frozen=True)
class TrialFile:
    """One trial of a search: when it has been drawn, or when its folder says that it is over."""

    search: Path
    trial: int
    is_over: bool

    @property
    def is_reached(self) -> bool:
        folder = self.search / name_trial(self.trial)
        return (folder / TRIAL_FILE).exists() and read_trial(folder).is_over >= self.is_over

    def release(self) -> None:
        """Nothing waits for it."""


@dataclass(frozen=True)
class Pause:
    """One trial of a search, when so many of its epochs are on record."""

    search: Path
    trial: int
    num_epochs: int

    @property
    def run(self) -> Path:
        return self.search / name_trial(self.trial)

    @property
    def is_reached(self) -> bool:
        return len(read_epochs(self.run)) >= self.num_epochs

    def release(self) -> None:
        _place(self.run, self.num_epochs).unlink()


def choose_pauses(
    search: Path, num: int, num_trials: int, num_epochs: int, moments: random.Random
) -> list[Pause]:
    """So many, in the order in which they are to be released: a later trial starts later."""
    all_places = [(trial, epoch) for trial in range(num_trials) for epoch in range(1, num_epochs)]
    return [_make_pause(search, *place) for place in sorted(moments.sample(all_places, num))]


def choose_moments(
    search: Path, num: int, num_trials: int, num_epochs: int, moments: random.Random
) -> list[Pause | TrialFile]:
    """So many of all kinds, in their order; the last one keeps the search from its end.

    A trial's moments: 0 it was drawn, then the ends of its epochs but the last, then it is over.
    """
    last = (num_trials - 1, moments.randrange(1, num_epochs))
    earlier = [(trial, step) for trial in range(last[0]) for step in range(num_epochs + 1)]
    return [
        _make_pause(search, trial, step)
        if 0 < step < num_epochs
        else TrialFile(search, trial, is_over=step > 0)
        for trial, step in [*sorted(moments.sample(earlier, num - 1)), last]
    ]


def _make_pause(search: Path, trial: int, num_epochs: int) -> Pause:
    pause = Pause(search, trial, num_epochs)
    place = _place(pause.run, num_epochs)
    place.parent.mkdir(exist_ok=True)
    place.touch()
    return pause


def _place(run: Path, num_epochs: int) -> Path:
    return run.parent.parent / "pauses" / f"{run.name}-{num_epochs}"


def wait_at_pauses() -> None:
    """Makes the trainer of this process wait where there is a pause."""
    from train.data.batches import Batch
    from train.ranks.interrupt import Vote
    from train.run import Training

    plain = Training.train_epoch

    def wait_and_train(training: Training, batches: Iterator[Batch]) -> Vote:
        num_epochs = training.trainer.step // training.setup.plan.steps_per_epoch
        place = _place(training.setup.output.absolute(), num_epochs)
        while place.exists():
            time.sleep(POLL_S)
        return plain(training, batches)

    Training.train_epoch = wait_and_train  # type: ignore[method-assign,assignment]


def with_pauses(make_task: Callable[[Sequence[str]], Task]) -> Callable[[Sequence[str]], Task]:
    """The make_task of scripts/jobs/submit.py, for trainings that wait; they are pickled whole."""
    root = str(Path(__file__).resolve().parents[3])

    def make(argv: Sequence[str]) -> Task:
        task = make_task(argv)

        def train() -> None:
            import os
            import sys

            sys.path.insert(0, root)
            from train.ranks.cpus import settle_openmp

            settle_openmp(os.environ)  # before torch is imported, as the task does
            from tests.scripts.trials.pauses import wait_at_pauses

            wait_at_pauses()
            task()

        return train

    return make
