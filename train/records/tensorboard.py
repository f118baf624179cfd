"""The epochs as TensorBoard scalars, with --tensorboard."""

from __future__ import annotations

import importlib
import io
import logging
import os
import time
from pathlib import Path
from typing import Any

from dataset.errors import UserError

log = logging.getLogger("trainyard")


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
