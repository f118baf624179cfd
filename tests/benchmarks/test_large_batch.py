"""The large-batch benchmark in small: its plans, its records and what its table says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import large_batch
from benchmarks.large_batch_report import (
    Rows,
    draw_curves,
    final_accuracies,
    make_table,
    read_rows,
    won_back,
    write_rows,
)
from benchmarks.large_batch_task import (
    Data,
    Task,
    draw_images,
    fingerprint,
    make_plans,
    train_run,
)

SMALL_TASK = Task(num_classes=4, train_per_class=128, val_per_class=8, passes=2, eval_passes=1)


def make_rows(accuracies: dict[str, list[float]]) -> Rows:
    return [
        {
            "task": "x",
            "plan": plan,
            "seed": seed,
            "batch_size": 32,
            "lr": "0.1",
            "warmup_epochs": "0",
            "pass": number,
            "step": number,
            "acc1_pct": acc1_pct - 2 + number,
        }
        for plan, values in accuracies.items()
        for seed, acc1_pct in enumerate(values)
        for number in (1, 2)
    ]


def test_the_frozen_task_meets_its_own_rules() -> None:
    task, plans = Task(), make_plans(Task())
    assert task.num_classes >= 20
    assert task.num_train >= 8000
    assert task.num_train // (64 * task.small_batch) * task.passes >= 200
    assert [plan.times for plan in plans.values()] == [1, 16, 16, 16, 16, 64, 64, 64, 64]


def test_the_reference_scales_without_warm_up_and_ours_is_the_table() -> None:
    plans = make_plans(Task())
    assert plans["reference, LR left, 64x"].recipe.lr == 0.1
    assert plans["reference, LR scaled, 64x"].recipe.lr == pytest.approx(6.4)
    assert plans["reference, LR scaled, 64x"].recipe.warmup_epochs == 0
    assert plans["ours (auto: lars), 16x"].recipe.lr == pytest.approx(11.3137, rel=1e-5)
    assert (
        plans["ours (auto: lars), 64x"].recipe.name,
        plans["ours (auto: lars), 64x"].recipe.warmup_epochs,
    ) == ("lars", 5)


def test_won_back_is_the_share_of_the_loss_that_ours_does_not_have() -> None:
    ours, theirs = "ours (sgd), 16x", "reference, LR left, 16x"
    accuracies = {"small batch": [80.0], theirs: [70.0], ours: [79.0]}
    assert won_back(accuracies, ours, theirs) == "90 %"
    assert won_back(accuracies | {theirs: [81.0]}, ours, theirs) == "nothing was lost"


def test_table_and_picture_show_mean_spread_and_loss(tmp_path: Path) -> None:
    rows = make_rows(
        {
            "ours (auto: lars), 16x": [78.0, 80.0],
            "reference, LR left, 16x": [70.0, 70.0],
            "small batch": [80.0, 80.0],
        }
    )
    write_rows(tmp_path / "rows.csv", rows)
    rows = read_rows(tmp_path / "rows.csv")
    assert list(final_accuracies(rows)) == [
        "small batch",
        "reference, LR left, 16x",
        "ours (auto: lars), 16x",
    ]
    lines = make_table(rows).splitlines()
    assert lines[3].endswith("| 70.0 (70.0 to 70.0) | 10.0 |  |  |")
    assert lines[4].endswith("| 79.0 (78.0 to 80.0) | 1.0 | 90 % |  |")
    draw_curves(rows, 2, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_curve_of_a_run_repeats_and_learns() -> None:
    torch.set_num_threads(1)
    data = Data(*draw_images(SMALL_TASK, 0, 128), *draw_images(SMALL_TASK, 1, 8))
    plan = make_plans(SMALL_TASK)["small batch"]
    first = list(train_run(SMALL_TASK, plan, 0, data))
    assert first == list(train_run(SMALL_TASK, plan, 0, data))
    assert [row["step"] for row in first] == [16, 32]
    assert first[1]["loss"] < first[0]["loss"]
    other = list(train_run(SMALL_TASK, plan, 1, data))
    assert other[1]["loss"] != first[1]["loss"]


def test_a_record_of_another_task_or_recipe_is_not_counted() -> None:
    plans, others = make_plans(Task()), make_plans(Task(base_lr=0.2))
    names = ("small batch", "reference, LR left, 16x")
    assert fingerprint(Task(), plans[names[0]]) != fingerprint(Task(), others[names[0]])
    assert fingerprint(Task(), plans[names[0]]) != fingerprint(Task(), plans[names[1]])
    assert fingerprint(Task(), plans[names[0]]) == fingerprint(Task(), make_plans(Task())[names[0]])


def test_only_missing_runs_are_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large_batch.csv"
    task = Task(num_classes=4, train_per_class=8, val_per_class=2, passes=1, eval_passes=1)
    plan = make_plans(task)["small batch"]
    monkeypatch.setattr(large_batch, "make_plans", lambda _: {plan.name: plan})
    monkeypatch.setattr(large_batch, "SEEDS", (0, 1))
    assert list(large_batch.train_missing(task, [], path, 1, 1)) == ["small batch, seed 0"]
    kept = path.read_text()
    list(large_batch.train_missing(task, read_rows(path), path, None, 1))
    assert path.read_text().startswith(kept)
    assert {row["seed"] for row in read_rows(path)} == {"0", "1"}
    before = path.stat().st_mtime_ns
    assert list(large_batch.train_missing(task, read_rows(path), path, None, 1)) == []
    assert path.stat().st_mtime_ns == before
