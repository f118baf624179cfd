"""The search benchmark in small: its replay, its arithmetic, and that it goes on."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import search, search_doc
from benchmarks.bench import FACTS, RESULTS
from benchmarks.large_batch_task import Task as NetTask
from benchmarks.search_picture import draw_picture
from benchmarks.search_replay import SEARCHERS, replay
from benchmarks.search_task import Cell, SearchTask
from benchmarks.search_verdict import NUM_SAME, RANDOM, TPE, judge, sign_test, summarise, tables

TINY = SearchTask(
    momenta=(0.0, 0.9),
    lrs=(0.1, 1.0),
    num_trials=11,
    num_seeds=1,
    net=NetTask(
        num_classes=2,
        train_per_class=2,
        val_per_class=2,
        widths=(8,),
        passes=1,
        epochs=1,
        small_batch=2,
        eval_passes=1,
    ),
)


def make_result(tpe: list[list[float]], random: list[list[float]]) -> dict[str, Any]:
    """A record of 72 trainings of 10 to 81 % and these searches."""
    task = SearchTask()
    runs = [
        {"recipe": recipe, "momentum": momentum, "lr": lr, "acc1_pct": [10.0 + number]}
        for number, (recipe, momentum, lr) in enumerate(task.cells)
    ]
    machine = {"cpus": 2, "processor": "a processor"}
    facts = dict.fromkeys(FACTS, "x") | {"rounds": len(tpe), "machine": machine, "optuna": "5"}
    found = {TPE: tpe, RANDOM: random}
    return facts | {"task": asdict(task), "runs": runs, "best_so_far_pct": found}


def run_main(monkeypatch: pytest.MonkeyPatch, out: Path, *flags: str) -> None:
    monkeypatch.setattr(search, "QUICK", TINY)
    command = ["search.py", "--quick", "--jobs", "1", "--out", str(out), *flags]
    monkeypatch.setattr(sys, "argv", command)
    assert search.main() == 0


def height(task: SearchTask, cell: Cell) -> float:
    """A table with one hill."""
    recipe, momentum, lr = cell
    across, along = task.lrs.index(lr) - 4, task.momenta.index(momentum) - 2
    return 80.0 - across**2 - along**2 - (10 if recipe == "lars" else 0)


def test_the_task_meets_the_rules_of_the_proof() -> None:
    task = SearchTask()
    assert len(set(task.cells)) >= 60
    assert task.num_seeds == 50
    assert task.net.num_classes * task.net.val_per_class >= 1000
    assert len({task.digest, SearchTask(momenta=(0.0, 0.9)).digest}) == 2


def test_both_searchers_begin_with_the_same_draws_and_then_part() -> None:
    task = SearchTask()
    table = {cell: height(task, cell) for cell in task.cells}
    for seed in (0, 1):
        tpe, random = (replay(task, table, SEARCHERS[name], seed) for name in (TPE, RANDOM))
        assert tpe[:NUM_SAME] == random[:NUM_SAME]
        assert tpe == sorted(tpe) and len(tpe) == task.num_trials
        assert tpe != random
    assert tpe == replay(task, table, SEARCHERS[TPE], seed)


@pytest.mark.parametrize(
    ("num_better", "num_worse", "p_value"),
    [(0, 0, 1.0), (5, 5, 1.0), (6, 0, 2 / 64), (0, 6, 2 / 64), (9, 1, 22 / 1024)],
)
def test_the_sign_test_is_that_of_a_fair_coin(
    num_better: int, num_worse: int, p_value: float
) -> None:
    assert sign_test(num_better, num_worse) == pytest.approx(p_value)


def test_a_searcher_that_is_nearer_with_most_seeds_is_better() -> None:
    good, poor = [70.0] * 10 + [81.0] * 20, [70.0] * 10 + [75.0] * 20
    found = judge(make_result([good] * 9 + [poor], [poor] * 10))
    assert [c.words for c in found.comparisons] == ["no difference shown", *["TPE is better"] * 3]
    assert (found.num_near, found.trials_to_near) == (1, {TPE: 11, RANDOM: float("inf")})
    assert "After 15, 20, 30 trials: TPE is better." in summarise(found)
    swapped = summarise(judge(make_result([poor] * 10, [good] * 9 + [poor])))
    assert "After 15, 20, 30 trials: random search is better." in swapped
    equal = summarise(judge(make_result([good, poor], [poor, good])))
    assert "After 15, 20, 30 trials: no difference shown." in equal


def test_the_table_has_medians_shares_and_pairs() -> None:
    good, poor = [81.0] * 30, [80.0] * 30
    ((_, _, rows),) = tables(make_result([good, good, poor], [poor, poor, good]))
    assert rows[0][-1] == "same draws"
    spread = ["0.00 (0.00 to 0.50)", "1.00 (0.50 to 1.00)"]
    assert rows[1] == ["15", *spread, "67 %", "33 %", "2 / 0 / 1", "1.000"]


def test_a_killed_benchmark_goes_on_and_trains_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_main(monkeypatch, tmp_path, "--limit", "3")
    path = tmp_path / "search_quick.jsonl"
    kept = path.read_bytes()
    path.write_bytes(kept + b'{"recipe": "s')  # a line that a kill tore
    run_main(monkeypatch, tmp_path)
    assert path.read_bytes().startswith(kept)
    monkeypatch.setattr(search, "train_cell", None)
    run_main(monkeypatch, tmp_path)
    record = json.loads((tmp_path / "search_quick.json").read_text())
    cells = [(run["recipe"], run["momentum"], run["lr"]) for run in record["runs"]]
    assert cells == TINY.cells
    drawn = (tmp_path / "search_quick.svg").read_bytes()
    draw_picture(record, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == drawn


def test_the_page_shows_what_the_record_says(tmp_path: Path) -> None:
    page = "before\n<!-- begin: search -->\n<!-- end: search -->\nafter\n"
    path = tmp_path / "search.json"
    assert search_doc.NOT_RUN in search_doc.make_doc(page, path)
    path.write_text(json.dumps(make_result([[81.0] * 30], [[80.0] * 30])))
    text = search_doc.make_doc(page, path)
    assert search_doc.NOT_RUN not in text
    assert "| 0.00 (0.00 to 0.00) | 1.00 (1.00 to 1.00) | 100 % | 0 % | 1 / 0 / 0 |" in text
    assert search_doc.make_doc(text, path) == text


def test_the_search_page_is_up_to_date() -> None:
    text = search_doc.DOC.read_text()
    assert search_doc.make_doc(text, RESULTS / "search.json") == text
