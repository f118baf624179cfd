"""The runs of a long benchmark: one task, one commit, one process at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import run_file
from benchmarks.run_file import RunFlags, open_runs
from dataset.errors import UserError


def test_runs_of_another_commit_or_task_are_refused_until_told_to_start_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "runs.jsonl"
    monkeypatch.setattr(run_file, "find_commit", lambda: "aaa")
    with open_runs(path, "one", fresh=False) as file:
        file.add({"seed": 0})
    with pytest.raises(UserError, match=r"runs of task one, .* start over with --fresh"):
        with open_runs(path, "other", fresh=False):
            pass
    monkeypatch.setattr(run_file, "find_commit", lambda: "bbb")
    with pytest.raises(UserError, match="runs of commit aaa, and this is commit bbb"):
        with open_runs(path, "one", fresh=False):
            pass
    with open_runs(path, "one", fresh=True) as file:
        assert file.runs == []


def test_two_benchmarks_do_not_share_a_file(tmp_path: Path) -> None:
    with open_runs(tmp_path / "runs.jsonl", "one", fresh=False):
        with pytest.raises(UserError, match="another process"):
            with open_runs(tmp_path / "runs.jsonl", "one", fresh=False):
                pass


def test_a_quick_run_is_no_record() -> None:
    with pytest.raises(UserError, match="--quick shows nothing"):
        RunFlags(quick=True, save=True)
