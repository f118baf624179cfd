"""Places in a search where a training waits for the test, which kills the search meanwhile.

A training that has reached its pause waits before its next epoch, while a file exists: so a kill at
that moment always meets a search that is not over, however slow or fast the machine is.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from train.records.record import read_epochs

POLL_S = 0.01
Task = Callable[[], None]


@dataclass(frozen=True)
class Pause:
    """One trial of a search, when so many of its epochs are on record."""

    search: Path
    trial: int
    num_epochs: int

    @property
    def run(self) -> Path:
        return self.search / f"trial{self.trial:04d}"

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
    pauses = [Pause(search, *place) for place in sorted(moments.sample(all_places, num))]
    for pause in pauses:
        place = _place(pause.run, pause.num_epochs)
        place.parent.mkdir(exist_ok=True)
        place.touch()
    return pauses


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
