"""The pictures of the docs: their command, and the records that they show."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from dataset.errors import UserError
from tests.history import assert_is_in_history
from tests.report import pictures

RECORDS = sorted(pictures.EXAMPLES.rglob("run.json"))


def test_help_is_shown_and_a_wrong_word_refused_before_a_browser_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pictures, "start_browser", None)  # a call would be a TypeError
    monkeypatch.setattr("sys.argv", ["pictures.py", "--help"])
    with pytest.raises(SystemExit) as end:
        pictures.main()
    assert end.value.code == 0
    assert "writes docs/pictures/*.png" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["pictures.py", "x"])
    with pytest.raises(UserError, match=r"unrecognized arguments: x; python -m tests\.report\.p"):
        pictures.main()


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: "/".join(path.parts[-3:-1]))
def test_the_records_of_the_examples_name_a_commit_of_this_history(path: Path) -> None:
    assert_is_in_history(json.loads(path.read_text())["commit"])


@pytest.mark.parametrize("path", sorted(pictures.EXAMPLES.rglob("predictions.csv")), ids=str)
def test_the_predictions_of_an_example_are_those_of_its_record(path: Path) -> None:
    record = json.loads((path.parent / "run.json").read_text())
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == record["dataset"]["num_val"]
    num_right = sum(row["label"] == row["top1"] for row in rows)
    assert 100 * num_right / len(rows) == pytest.approx(record["result"]["final_acc1"])
