"""The record of earlier attempts: added to where it is whole, refused in words where it is not."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dataset.errors import DataError
from train.ranks.launch import Launch
from train.records.record import EPOCHS_FILE, PHASES, RUN_FILE, read_run
from train.records.recorder import Recorder

ALONE = Launch("single", "")
SECONDS = [dict.fromkeys(PHASES, 1.0)]
ODD_VALUES: tuple[Any, ...] = (None, True, -1, "x", [], {}, [1], {"a": 1}, [None], [{}])


def attempt(folder: Path) -> Recorder:
    """An attempt from its begin to its end."""
    recorder = Recorder(folder, ALONE)
    recorder.begin(time.monotonic(), None, {})
    recorder.update(SECONDS, {})
    recorder.finish("checkpointed", 85, "SIGTERM")
    return recorder


def find_places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value below one."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in pairs:
        yield (*path, key)
        if isinstance(part, dict | list):
            yield from find_places(part, (*path, key))


def test_any_odd_value_in_a_record_is_added_to_or_refused_with_the_fix(tmp_path: Path) -> None:
    whole = attempt(tmp_path).run
    refused = 0
    for path in find_places(whole):
        for odd in ODD_VALUES:
            record = copy.deepcopy(whole)
            parent: Any = record
            for key in path[:-1]:
                parent = parent[key]
            parent[path[-1]] = odd
            (tmp_path / RUN_FILE).write_text(json.dumps(record))
            try:
                assert len(attempt(tmp_path).run["attempts"]) in (1, 2)
            except DataError as error:
                refused += 1
                assert str(tmp_path / RUN_FILE) in str(error)
    assert refused > 50


@pytest.mark.parametrize("name", ["attempts", "reason", "seconds", "ranks"])
def test_a_record_without_a_field_says_how_the_run_goes_on(tmp_path: Path, name: str) -> None:
    record = copy.deepcopy(attempt(tmp_path).run)
    del (record if name == "attempts" else record["attempts"][0])[name]
    (tmp_path / RUN_FILE).write_text(json.dumps(record))
    with pytest.raises(DataError, match=r"attempts.*move it away: the run continues"):
        Recorder(tmp_path, ALONE)


def test_attempts_add_up(tmp_path: Path) -> None:
    attempt(tmp_path)
    attempt(tmp_path)
    run = read_run(tmp_path)
    assert run["wall_clock_s"] == 2 * len(PHASES)
    assert run["phases"]["compute"] == {"mean_s": 2.0, "max_s": 2.0}


def test_a_failed_attempt_leaves_its_exit_code_though_its_epochs_cannot_be_written(
    tmp_path: Path,
) -> None:
    """condor/job.sh reads it there."""
    recorder = Recorder(tmp_path, ALONE)
    recorder.begin(time.monotonic(), None, {})
    (tmp_path / EPOCHS_FILE).mkdir()
    recorder.add_epoch({"epoch": 0})
    with pytest.raises(IsADirectoryError):
        recorder.finish("done", 0, "done")
    assert read_run(tmp_path)["status"] == "running"
    recorder.finish("failed", 2, "error: Is a directory")
    assert (read_run(tmp_path)["status"], read_run(tmp_path)["exit_code"]) == ("failed", 2)
