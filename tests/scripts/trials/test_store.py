"""Trials in their folders and in Optuna's journal: either can be behind, torn or gone."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dataset.errors import DataError, UserError
from report.search.trials import read_trial
from scripts.trials.journal import JOURNAL, mend_journal
from scripts.trials.store import Store, read_trials, write_trial
from tests.scripts.trials.searches import find_disagreements, make_plan, read_journal

PLAN = make_plan(prune=True)


def fill(folder: Path) -> Store:
    """A search of four trials, each in another state."""
    store = Store(folder, PLAN, is_sole=True)
    first = store.report(store.ask(0), {1: 10.0, 2: 20.0, 3: 30.0}, 3)[0]
    store.end(first, "complete", 30.0)
    second, is_hopeless = store.report(store.ask(1), {1: 5.0}, 3)
    assert is_hopeless
    store.end(second, "pruned", 5.0)
    store.end(store.ask(2), "failed", note="exit 1")
    store.report(store.ask(3), {1: 12.0}, 3)
    return store


def test_a_trial_is_the_same_in_both_places(tmp_path: Path) -> None:
    trials = fill(tmp_path).trials
    assert find_disagreements(tmp_path, PLAN) == []
    assert [trial.state for trial in trials.values()] == ["complete", "pruned", "failed", "running"]
    assert read_trials(tmp_path) == trials


def test_opening_it_again_changes_nothing(tmp_path: Path) -> None:
    trials = fill(tmp_path).trials
    journal = (tmp_path / JOURNAL).read_bytes()
    assert Store(tmp_path, PLAN, is_sole=True).trials == trials
    assert (tmp_path / JOURNAL).read_bytes() == journal


def test_a_trial_keeps_its_number_and_its_draw(tmp_path: Path) -> None:
    """Whichever is asked for first, and by however many processes."""
    (tmp_path / "a").mkdir()
    here = Store(tmp_path / "a", PLAN, True)
    late, early = here.ask(2), here.ask(0)
    assert (late.number, early.number) == (2, 0)
    again = Store(tmp_path / "a", PLAN, True)
    assert [again.ask(n) for n in (0, 2)] == [early, late]
    (tmp_path / "b").mkdir()
    apart = Store(tmp_path / "b", PLAN, True)
    assert apart.ask(0).params == early.params
    assert find_disagreements(tmp_path / "b", PLAN) == []


@pytest.mark.parametrize("number", [0, 12])
def test_a_kill_between_two_flags_of_a_draw_does_not_change_it(tmp_path: Path, number: int) -> None:
    """At random at first (0), and when the sampler has learnt (12)."""
    plan = make_plan(space="lr=log:0.01..10, label_smoothing=0..0.2, recipe=sgd|lars, wd=0..1")
    store = Store(tmp_path, plan, True)
    for before in range(number):
        store.end(store.ask(before), "complete", float(before % 5))
    whole = (tmp_path / JOURNAL).stat().st_size
    drawn = store.ask(number).params
    lines = (tmp_path / JOURNAL).read_bytes()[whole:].splitlines(keepends=True)
    assert sum(b"param_name" in line for line in lines) == 4
    for num_lines in range(1, len(lines)):
        (tmp_path / f"trial{number:04d}/trial.json").unlink()
        os.truncate(tmp_path / JOURNAL, whole + len(b"".join(lines[:num_lines])))
        assert Store(tmp_path, plan, True).ask(number).params == drawn


@pytest.mark.parametrize("num_bytes", [1, 2, 30])
def test_a_torn_last_line_is_cut(tmp_path: Path, num_bytes: int) -> None:
    trials = fill(tmp_path).trials
    path = tmp_path / JOURNAL
    path.write_bytes(path.read_bytes()[:-num_bytes])
    store = Store(tmp_path, PLAN, is_sole=True)
    assert store.trials == trials
    drawn = store.ask(4)  # another line: after a torn one, neither could ever be read again
    assert Store(tmp_path, PLAN, is_sole=True).trials == {**trials, 4: drawn}
    assert find_disagreements(tmp_path, PLAN) == []
    assert not list(tmp_path.glob(f"{JOURNAL}.damaged*")), "cut, not made again"


def refuse_to_wait(_seconds: float) -> None:
    raise AssertionError("waits for a lock that nobody holds")


def test_the_lock_of_a_dead_process_is_taken_over_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)
    (tmp_path / f"{JOURNAL}.lock").touch()
    monkeypatch.setattr(time, "sleep", refuse_to_wait)  # Optuna itself waits for 30 s
    store = Store(tmp_path, PLAN, is_sole=True)
    store.ask(4)
    assert find_disagreements(tmp_path, PLAN) == []


def test_a_lock_that_may_be_held_is_left_to_optuna(tmp_path: Path) -> None:
    (tmp_path / f"{JOURNAL}.lock").touch()
    mend_journal(tmp_path, is_sole=False)
    assert (tmp_path / f"{JOURNAL}.lock").exists()


@pytest.mark.parametrize("damage", [b"\0" * 40 + b"\n", b'{"op_code": 99}\n', b"[]\n", b"{}\n"])
def test_a_damaged_journal_is_set_aside_and_made_again(tmp_path: Path, damage: bytes) -> None:
    trials = fill(tmp_path).trials
    path = tmp_path / JOURNAL
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], damage, *lines[3:]]))
    assert Store(tmp_path, PLAN, is_sole=True).trials == trials
    assert find_disagreements(tmp_path, PLAN) == []
    assert (tmp_path / f"{JOURNAL}.damaged1").exists()


def test_the_journal_is_made_again_from_the_folders(tmp_path: Path) -> None:
    trials = fill(tmp_path).trials
    before = read_journal(tmp_path, PLAN)
    (tmp_path / JOURNAL).unlink()
    store = Store(tmp_path, PLAN, is_sole=True)
    assert store.trials == trials
    after = read_journal(tmp_path, PLAN)
    assert [(t.params, t.attrs, t.value) for t in after] == [
        (t.params, t.attrs, t.value) for t in before
    ]
    assert store.ask(4).number == 4


def test_a_folder_that_is_gone_is_written_again_from_the_journal(tmp_path: Path) -> None:
    trials = fill(tmp_path).trials
    (tmp_path / "trial0000" / "trial.json").unlink()
    again = Store(tmp_path, PLAN, is_sole=True).trials
    assert (again[0].value, again[0].params) == (30.0, trials[0].params)
    assert find_disagreements(tmp_path, PLAN) == []


def test_the_journal_of_another_search_is_not_believed(tmp_path: Path) -> None:
    trials = fill(tmp_path).trials
    other = make_plan(seed=1)
    (tmp_path / "other").mkdir()
    Store(tmp_path / "other", other, is_sole=True).ask(0)
    (tmp_path / "other" / JOURNAL).rename(tmp_path / JOURNAL)
    assert Store(tmp_path, PLAN, is_sole=True).trials == trials
    assert find_disagreements(tmp_path, PLAN) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"number": -1},
        {"state": "lost"},
        {"value": "high"},
        {"params": {"lr": [1]}},
        {"params": {}},
        {"reports": {"first": 1.0}},
        {"began_s": None},
        {"schema": "1"},
    ],
)
def test_a_damaged_trial_file_is_one_line(tmp_path: Path, changes: dict[str, object]) -> None:
    fill(tmp_path)
    path = tmp_path / "trial0000" / "trial.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(DataError, match=r"trial\.json"):
        read_trial(path.parent)


def test_a_folder_with_another_trials_file_is_named(tmp_path: Path) -> None:
    trial = fill(tmp_path).trials[0]
    write_trial(tmp_path / "trial0001", replace(trial, number=5))
    with pytest.raises(UserError, match="is of trial0005"):
        read_trials(tmp_path)
