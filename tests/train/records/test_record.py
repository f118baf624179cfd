"""What a run.json says of the model beside it: trained to the end, or why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from condor import slot
from report.grid.eventlog import JobId
from report.grid.jobs import SUCCESS, UNCHECKED, WRONG_OUTPUT, JobHistory
from report.grid.rows import JobRecord, make_row
from report.record_shape import shape_record
from train.records.record import explain_untrained

TRAINED: dict[str, Any] = {"status": "done", "exit_code": 0, "images_trained": 1280}
NOTHING = "run.json says that nothing was trained"
# What differs from a record of a trained model, and the reason that is given.
UNTRAINED: dict[str, tuple[dict[str, Any], str]] = {
    "stopped": ({"status": "checkpointed", "exit_code": 85}, "run.json says checkpointed, exit 85"),
    "failed": ({"status": "failed", "exit_code": 1}, "run.json says failed, exit 1"),
    "other code": ({"exit_code": 3}, "run.json says done, exit 3"),
    "no code": ({"exit_code": None}, "run.json says done, exit None"),
    "no image": ({"images_trained": 0}, NOTHING),
    "no count": ({"images_trained": None}, NOTHING),
    "a text": ({"images_trained": "1280"}, NOTHING),
    "true": ({"images_trained": True}, NOTHING),
    "below 0": ({"images_trained": -1}, NOTHING),
    "endless": ({"images_trained": 1e20}, NOTHING),
}


def test_a_run_that_is_done_with_images_was_trained() -> None:
    assert explain_untrained(TRAINED) == ""


@pytest.mark.parametrize("name", UNTRAINED)
def test_a_run_that_was_not_trained_to_the_end_is_said_to_be_so(name: str) -> None:
    changes, reason = UNTRAINED[name]
    assert explain_untrained(TRAINED | changes) == reason


@pytest.mark.parametrize("name", ["trained", *UNTRAINED])
def test_the_slot_and_the_report_of_the_grid_judge_a_record_alike(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, _ = UNTRAINED.get(name, ({}, ""))
    run = TRAINED | changes
    monkeypatch.setattr(slot, "OUT", tmp_path)
    (tmp_path / "model.pt").write_bytes(b"weights")
    (tmp_path / "run.json").write_text(json.dumps(run))
    history = JobHistory(JobId(1, 0), outcome=UNCHECKED, exit_code=0)
    row = make_row(history, JobRecord(shape_record(run)[0]))
    assert row.outcome == (SUCCESS if name == "trained" else WRONG_OUTPUT)
    assert slot.verify(0) == (0 if name == "trained" else 3)
    assert (tmp_path / "model.pt").exists() == (name == "trained")
