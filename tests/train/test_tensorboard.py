"""--tensorboard writes the numbers of epochs.jsonl, and says what to install where it cannot."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dataset.errors import UserError
from train.tensorboard import EpochBoard


def test_an_epoch_is_read_back_by_tensorboard(tmp_path: Path) -> None:
    EpochBoard(tmp_path).add({"epoch": 3, "step": 40, "val_acc1": 61.5, "lr": 0.1})
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == {"val_acc1", "lr"}
    (scalar,) = events.Scalars("val_acc1")
    assert (scalar.step, scalar.value) == (40, 61.5)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match="pip install tensorboard"):
        EpochBoard(tmp_path)
