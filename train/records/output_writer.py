"""What rank 0 writes of a run: checkpoints, its record and, if asked for, TensorBoard events."""

from __future__ import annotations

import importlib
import io
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
import torchvision

from dataset.errors import UserError
from train.checkpoints import checkpoint
from train.device import name_device
from train.failure import ADVICE, Diverged
from train.prepare import Setup, recipe_values
from train.ranks.batch_system import describe_slot, queue_seconds
from train.records.classes import CLASSES_FILE, write_classes
from train.records.phases import PhaseClock
from train.records.recorder import Recorder
from train.run_folder import flags_of, lock_folder

log = logging.getLogger("trainyard")

MIN_GAP_S = 30.0  # between checkpoints of epochs: on 128 GPUs an epoch lasts 4 s
NO_VALIDATION = "no validation images: accuracy is not measured"
COMMUNICATION_METHOD = (
    "estimate: what DDP samples of all-reduce time that backward did not cover, times the steps"
)


class OutputWriter:
    """Owns the output folder from the first step of an attempt to its end."""

    def __init__(self, setup: Setup, clock: PhaseClock, first_step: int) -> None:
        cfg, output = setup.cfg, setup.output
        output.mkdir(parents=True, exist_ok=True)
        lock_folder(output)
        self._interval_s = cfg.checkpoint_minutes * 60
        self._interval_began_s = time.monotonic()
        self._output = output
        self.checkpoints = checkpoint.CheckpointWriter(output / "ckpt", first_step)
        self.recorder = Recorder(output, setup.launch)
        self._board = EpochBoard(output / "tensorboard") if cfg.tensorboard else None
        queue_s = queue_seconds(os.environ, setup.launch.job)
        if setup.classes is not None:
            write_classes(output, setup.classes)
        self.recorder.begin(clock.started_s, queue_s, describe_run(setup))

    def is_due(self) -> bool:
        """Whether the checkpoint interval is over."""
        return time.monotonic() - self._interval_began_s > self._interval_s

    def begin_interval(self) -> None:
        """A checkpoint is asked for or made: the next one is due an interval later."""
        self._interval_began_s = time.monotonic()

    def refuse_not_finite(self, step: int) -> None:
        """Raises if the writer found weights that are not finite."""
        if self.checkpoints.not_finite:
            raise Diverged(f"the weights are not finite at step {step}" + ADVICE)

    def add_epoch(self, record: dict[str, Any]) -> None:
        """Records an epoch that was trained and validated."""
        self.recorder.add_epoch(record)
        if self._board:
            self._board.add(record)

    def is_too_soon(self) -> bool:
        """Whether the last checkpoint, or the start, was so recent that another saves little."""
        return time.monotonic() - self._interval_began_s < min(MIN_GAP_S, self._interval_s)

    def save(self, state: checkpoint.State, is_best: bool) -> None:
        """Starts to write a checkpoint."""
        records = [path for path in (self.recorder.epochs_path,) if path.exists()]
        self.checkpoints.save(state | {"schema": checkpoint.SCHEMA}, is_best, records)
        self.begin_interval()

    def require_durable(self) -> None:
        """Raises if the last checkpoint is not on the disk at the end of a run."""
        if not self.checkpoints.wait():
            raise UserError(
                f"trained to the end, but the last checkpoint cannot be written to {self._output}; "
                "free some space and run the same command again"
            )


class EpochBoard:
    """Writes the numbers of an epoch's record under their own names.

    torch's SummaryWriter is not used: on a full disk its thread dies with a traceback and ends the
    training. Here, what could not be written is written with the next epoch.
    """

    def __init__(self, folder: Path) -> None:
        try:
            events = importlib.import_module("tensorboard.compat.proto.event_pb2")
            writers = importlib.import_module("tensorboard.summary.writer.record_writer")
        except ImportError:
            raise UserError(
                "--tensorboard needs the package of that name: pip install tensorboard"
            ) from None
        self._event, self._record_writer = events.Event, writers.RecordWriter
        folder.mkdir(parents=True, exist_ok=True)
        now, host = time.time(), os.uname().nodename
        self._path = folder / f"events.out.tfevents.{now:010.0f}.{host}.{os.getpid()}.0"
        self._waiting: list[Any] = [self._event(wall_time=now, file_version="brain.Event:2")]
        self._write()

    def add(self, record: dict[str, Any]) -> None:
        event = self._event(wall_time=time.time(), step=record["step"])
        for name, value in record.items():
            if name not in ("epoch", "step") and value is not None:
                event.summary.value.add(tag=name, simple_value=value)
        self._waiting.append(event)
        try:
            self._write()
        except OSError as error:
            log.warning("TensorBoard's events not written: %s; training goes on", error.strerror)

    def _write(self) -> None:
        framed = io.BytesIO()
        writer = self._record_writer(framed)
        for event in self._waiting:
            writer.write(event.SerializeToString())
        with open(self._path, "ab", buffering=0) as file:
            begin = file.tell()
            try:
                append_whole(file, framed.getvalue())
            except OSError:
                file.truncate(begin)  # TensorBoard stops reading at a torn event
                raise
        self._waiting = []


def append_whole(file: io.FileIO, data: bytes) -> None:
    """Writes all the bytes; on a disk that fills up the second write says so."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def describe_run(setup: Setup) -> dict[str, Any]:
    """The fields that are known at the start; a later attempt overwrites them."""
    data = setup.dataset
    config = setup.cfg.as_record() | recipe_values(setup.recipe)
    config |= {
        "precision": setup.placement.precision,
        "microbatch": setup.plan.microbatch,
        "workers": setup.num_workers,
        "threads": torch.get_num_threads(),
        "decoder": setup.decoder.name,
        "order": setup.order.name,
    }
    return {
        "run_id": setup.output.name,
        "config": config,
        "flags": flags_of(setup.cfg),
        "world_size": setup.launch.world_size,
        "num_nodes": setup.launch.num_nodes,
        "device": name_device(setup.placement.device),
        "versions": describe_versions(),
        "commit": current_commit(),
        "host": os.uname().nodename,
        "dataset": {
            "path": data.path if data else None,
            "source": data.kind if data else "dummy",
            "fingerprint": data.fingerprint if data else None,
            "num_train": setup.num_train,
            "num_val": setup.num_val,
            "num_classes": setup.num_classes,
            "classes": CLASSES_FILE if data else None,  # their names, beside this record
            **{k: v for k, v in setup.order.identity.items() if k != "order"},  # units, window
            **({"note": NO_VALIDATION} if data and not setup.num_val else {}),
            **({"val_share": setup.cfg.val_share} if setup.cfg.val_share else {}),  # by config.seed
        },
        "communication_method": COMMUNICATION_METHOD,
        "scheduler": describe_slot(os.environ, setup.launch.job),
    }


def describe_versions() -> dict[str, str]:
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "numpy": np.__version__,
        "pillow": PIL.__version__,
    }


def current_commit() -> str | None:
    """The commit of this checkout, with '-dirty' where files differ; None outside of git."""
    root = Path(__file__).resolve().parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None if answer.returncode == 0 else None
