"""--tensorboard writes the numbers of epochs.jsonl, and says what to install where it cannot."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dataset.errors import UserError
from train.records.output_writer import EpochBoard


def test_an_epoch_is_read_back_by_tensorboard(tmp_path: Path) -> None:
    EpochBoard(tmp_path).add({"epoch": 3, "step": 40, "val_acc1": 61.5, "lr": 0.1})
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == {"val_acc1", "lr"}
    (scalar,) = events.Scalars("val_acc1")
    assert (scalar.step, scalar.value) == (40, 61.5)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(UserError, match="pip install tensorboard"):
        EpochBoard(tmp_path)


def test_a_full_disk_costs_no_epoch_and_leaves_no_torn_event(tmp_path: Path) -> None:
    board = EpochBoard(tmp_path)
    board.add({"epoch": 0, "step": 1, "lr": 0.1})
    (file,) = tmp_path.iterdir()
    size = file.stat().st_size
    with limit_files(size + 10):  # a disk that fills up within the next event
        board.add({"epoch": 1, "step": 2, "lr": 0.2})
    assert file.stat().st_size == size
    board.add({"epoch": 2, "step": 3, "lr": 0.3})
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [scalar.step for scalar in events.Scalars("lr")] == [1, 2, 3]


@contextmanager
def limit_files(size: int) -> Iterator[None]:
    """No file grows beyond a size: the write that would do it is cut short, the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
