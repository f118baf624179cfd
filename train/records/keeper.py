"""What rank 0 writes of a run: checkpoints, records and, if asked for, TensorBoard events."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from dataset.errors import UserError
from train.checkpoints import checkpoint
from train.failure import ADVICE, Diverged
from train.prepare import Setup
from train.ranks.batch_system import queue_seconds
from train.records.classes import write_classes
from train.records.description import describe_run
from train.records.phases import PhaseClock
from train.records.recorder import Recorder
from train.records.tensorboard import EpochBoard
from train.run_folder import lock_folder

log = logging.getLogger("trainyard")

MIN_GAP_S = 30.0  # between checkpoints of epochs: on 128 GPUs an epoch lasts 4 s


class Keeper:
    """Owns the output folder from the first step of an attempt to its end."""

    def __init__(self, setup: Setup, clock: PhaseClock, first_step: int) -> None:
        cfg, output = setup.cfg, setup.output
        output.mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(output)
        self._interval_s = cfg.checkpoint_minutes * 60
        self._saved_s = time.monotonic()
        self._output = output
        self.writer = checkpoint.CheckpointWriter(output / "ckpt", first_step)
        self.recorder = Recorder(output, setup.launch)
        self._board = EpochBoard(output / "tensorboard") if cfg.tensorboard else None
        queue_s = queue_seconds(os.environ, setup.launch.job)
        if setup.classes is not None:
            write_classes(output, setup.classes)
        self.recorder.begin(clock.started_s, queue_s, describe_run(setup))

    def is_due(self) -> bool:
        """Whether the checkpoint interval is over; if so, a new one begins."""
        if time.monotonic() - self._saved_s <= self._interval_s:
            return False
        self._saved_s = time.monotonic()
        return True

    def refuse_not_finite(self, step: int) -> None:
        """Raises if the writer found weights that are not finite."""
        if self.writer.not_finite:
            raise Diverged(f"the weights are not finite at step {step}" + ADVICE)

    def add_epoch(self, record: dict[str, Any]) -> None:
        """Records an epoch that was trained and validated."""
        self.recorder.add_epoch(record)
        if self._board:
            self._board.add(record)

    def is_soon(self) -> bool:
        """Whether the last checkpoint, or the start, was so recent that another saves little."""
        return time.monotonic() - self._saved_s < min(MIN_GAP_S, self._interval_s)

    def save(self, state: checkpoint.State, is_best: bool) -> None:
        """Starts to write a checkpoint."""
        records = [path for path in (self.recorder.epochs_path,) if path.exists()]
        self.writer.save(state | {"schema": checkpoint.SCHEMA}, is_best, records)
        self._saved_s = time.monotonic()

    def require_durable(self) -> None:
        """Raises if the last checkpoint is not on the disk at the end of a run."""
        if not self.writer.wait():
            raise UserError(
                f"trained to the end, but the last checkpoint cannot be written to {self._output}; "
                "free some space and run the same command again"
            )
