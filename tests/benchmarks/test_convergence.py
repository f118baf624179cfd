"""The convergence benchmark in small: its arithmetic, its orders, and that it goes on."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import convergence, convergence_doc, convergence_task
from benchmarks.bench import FACTS, RESULTS
from benchmarks.convergence_picture import draw_picture
from benchmarks.convergence_task import SETS, Task, augment, shuffle_in_buffer
from benchmarks.convergence_verdict import (
    CONTROL,
    MARGIN,
    STREAMED,
    T_95,
    T_97,
    UNIFORM,
    Difference,
    compare,
    describe_second_looks,
    judge,
    summarise,
)
from benchmarks.run_file import open_runs
from dataset.errors import UserError

TINY = Task(
    train_per_look=2,
    num_val=100,
    widths=(8,),
    epochs=1,
    batch_size=16,
    seeds=(0, 1),
    more_seeds=(2,),
)
RARE = "5 classes (90/5/3/1/1 %)"
UNIFORM_PCT = [70.0, 71.0, 70.5, 69.5, 70.0]


def make_result(streamed: list[float], control: list[float]) -> dict[str, Any]:
    finals = {UNIFORM: UNIFORM_PCT, STREAMED: streamed, CONTROL: control}
    runs = [
        {"set": "100 classes", "order": order, "seed": seed, "seconds": 1.0}
        | {"acc1_pct": [final / 2, final], "class_mean_pct": final}
        for order, values in finals.items()
        for seed, final in enumerate(values)
    ]
    machine = {"cpus": 2, "processor": "a processor"}
    facts = dict.fromkeys(FACTS, "x") | {"rounds": 5, "machine": machine}
    return facts | {"task": vars(Task()), "window": Task().window, "runs": runs}


def shift(points: list[float]) -> list[float]:
    return [value + point for value, point in zip(UNIFORM_PCT, points, strict=True)]


def run_main(monkeypatch: pytest.MonkeyPatch, out: Path, *flags: str) -> None:
    monkeypatch.setattr(convergence_task, "CACHE", out / "cache")
    monkeypatch.setattr(convergence_task, "SETS", {RARE: SETS[RARE]})
    monkeypatch.setattr(convergence, "QUICK", TINY)
    command = ["convergence.py", "--quick", "--jobs", "1", "--out", str(out), *flags]
    monkeypatch.setattr(sys, "argv", command)
    assert convergence.main() == 0


def test_the_task_meets_the_rules_of_the_proof() -> None:
    task = Task()
    assert max(len(spec.looks) for spec in SETS.values()) >= 100
    assert {sum(spec.looks) for spec in SETS.values()} == {convergence_task.NUM_LOOKS}
    assert task.window_share <= 0.04
    assert task.window >= 16 * task.batch_size
    assert task.num_val >= 5000
    assert len(task.seeds) == 5
    assert len(set(task.runs)) == 3 * 3 * 5 + 2 * 2 * 7


def test_the_interval_is_that_of_the_t_distribution() -> None:
    ours = dict(enumerate([1.1, 1.8, 3.3, 4.0, 4.9]))
    theirs = dict(enumerate([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))  # the seed without a pair is left out
    found = compare(ours, theirs)
    assert found.pairs == pytest.approx((0.1, -0.2, 0.3, 0.0, -0.1))
    assert found.mean == pytest.approx(0.02)
    half = 2.131847 * 0.192354 / math.sqrt(5)  # t with 4 degrees of freedom, the deviation of the 5
    assert (found.low, found.high) == pytest.approx((0.02 - half, 0.02 + half), abs=1e-4)


@pytest.mark.parametrize("degrees", range(1, len(T_95) + 1))
@pytest.mark.parametrize(("quantiles", "share"), [(T_95, 0.95), (T_97, 0.975)])
def test_that_share_of_students_t_lies_below_the_quantile(
    quantiles: tuple[float, ...], share: float, degrees: int
) -> None:
    x = np.linspace(0, quantiles[degrees - 1], 400_001)
    scale = math.gamma((degrees + 1) / 2) / math.gamma(degrees / 2) / math.sqrt(degrees * math.pi)
    density = scale * (1 + x**2 / degrees) ** (-(degrees + 1) / 2)
    below = float(((density[1:] + density[:-1]) / 2 * np.diff(x)).sum())
    assert below == pytest.approx(share - 0.5, abs=1e-5)


@pytest.mark.parametrize(
    ("low", "high", "is_within"),
    [(-1.4, 1.4, True), (-1.6, 0.0, False), (0.0, 1.6, False), (-MARGIN, 0.0, False)],
)
def test_equivalence_needs_both_ends_within_the_margin(
    low: float, high: float, is_within: bool
) -> None:
    assert Difference((), 0.0, low, high).is_within_margin == is_within


def test_a_small_difference_beside_a_control_that_loses_is_equivalent() -> None:
    runs = make_result(shift([0.1, -0.2, 0.3, 0.0, -0.1]), [10.0] * 5)["runs"]
    (verdict,) = judge(runs)
    assert verdict.words == "equivalent within 1.5 points"
    assert verdict.between_seeds == pytest.approx(0.7)
    assert summarise([verdict]) == "Equivalent within 1.5 points: 100 classes."


def test_a_difference_beyond_the_margin_is_not_equivalent() -> None:
    (verdict,) = judge(make_result(shift([-2.0, -1.0, -2.0, -1.0, -2.0]), [10.0] * 5)["runs"])
    assert verdict.words == "equivalence not shown"
    assert summarise([verdict]) == "Equivalence not shown: 100 classes."


def test_a_second_look_is_told_with_an_interval_for_two() -> None:
    result = make_result(shift([-1.0, 1.0, -1.0, 1.0, -1.5]), [10.0] * 5)
    for run in result["runs"]:
        run["commit"] = "before" if run["seed"] < 2 else "now"
    extended = result | {"commit": "now", "earlier": [{"commit": "before"}]}
    (told,) = describe_second_looks(extended)
    assert "the first 2 pairs gave +0.00 (" in told
    assert "3 further seeds were trained; these alone give -0.50 (" in told
    (verdict,) = judge(result["runs"])
    narrow, told_interval = verdict.streamed, told.split("two looks: ")[1]
    assert told_interval.startswith(f"{narrow.mean:+.2f} (")
    low = float(told_interval.split("(")[1].split(" ")[0])
    assert low < narrow.low < -1.2 and told.endswith("not within 1.5 points.")
    assert describe_second_looks(result) == []


@pytest.mark.parametrize("lost", [9.0, 10.0])
def test_a_control_that_does_not_lose_means_no_power(lost: float) -> None:
    (verdict,) = judge(make_result(UNIFORM_PCT, shift([-lost] * 5))["runs"])
    assert verdict.words == "no power, as the control lost 10 points or less"
    assert summarise([verdict]).endswith("or less: 100 classes.")


def test_an_unbalanced_set_is_also_judged_by_the_mean_of_its_classes() -> None:
    runs = make_result(UNIFORM_PCT, [10.0] * 5)["runs"]
    for run in runs:
        if run["order"] == STREAMED:
            run["class_mean_pct"] -= 5
    top1, alike = judge(runs)
    assert (top1.name, top1.streamed.mean) == ("100 classes", 0)
    assert (alike.name, alike.streamed.mean) == ("100 classes, classes weighted alike", -5)
    assert summarise([top1, alike]).splitlines() == [
        "Equivalent within 1.5 points: 100 classes.",
        "Equivalence not shown: 100 classes, classes weighted alike.",
    ]


def test_an_image_is_augmented_the_same_way_in_any_order() -> None:
    images = torch.randint(0, 256, (8, 36, 36, 3), dtype=torch.uint8)
    forward = augment(images, 3, 1, np.arange(8))
    assert torch.equal(augment(images, 3, 1, np.arange(8)[::-1].copy()), forward.flip(0))
    assert not torch.equal(augment(images, 3, 2, np.arange(8)), forward)
    assert forward.shape == (8, 3, 32, 32)


def test_the_buffer_holds_no_more_than_its_size() -> None:
    order = shuffle_in_buffer(0, 0, np.arange(100), 10)
    assert sorted(order.tolist()) == list(range(100))
    assert all(sample < position + 10 for position, sample in enumerate(order.tolist()))
    assert not np.array_equal(order, np.arange(100))


def test_a_killed_benchmark_goes_on_and_trains_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_main(monkeypatch, tmp_path, "--limit", "2")
    path = tmp_path / "convergence_quick.jsonl"
    kept = path.read_bytes()
    path.write_bytes(kept + b'{"set": "5 cl')  # a line that a kill tore
    run_main(monkeypatch, tmp_path)
    assert path.read_bytes().startswith(kept)
    seeds = [json.loads(line)["seed"] for line in path.read_text().splitlines()]
    assert seeds == [0, 0, 0, 1, 1, 1, 2, 2]

    monkeypatch.setattr(convergence, "train_run", None)
    run_main(monkeypatch, tmp_path)
    record = json.loads((tmp_path / "convergence_quick.json").read_text())
    assert [(run["set"], run["order"], run["seed"]) for run in record["runs"]] == TINY.runs
    drawn = (tmp_path / "convergence_quick.svg").read_bytes()
    draw_picture(record, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == drawn


def test_a_record_is_extended_by_the_runs_that_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convergence, "RESULTS", tmp_path)
    with pytest.raises(UserError, match="to extend"):
        run_main(monkeypatch, tmp_path, "--extend")
    run_main(monkeypatch, tmp_path)
    path, runs = tmp_path / "convergence_quick.json", tmp_path / "convergence_quick.jsonl"
    record = json.loads(path.read_text()) | {"commit": "before"}
    for run in record["runs"]:
        run["commit"] = "before"
    kept = [run for run in record["runs"] if run["seed"] < 2]
    path.write_text(json.dumps(record | {"runs": kept}))
    runs.unlink()

    run_main(monkeypatch, tmp_path, "--extend")
    trained = [json.loads(line) for line in runs.read_text().splitlines()]
    assert [run["seed"] for run in trained] == [2, 2]
    extended = json.loads(path.read_text())
    assert extended["runs"] == kept + trained
    (earlier,) = extended["earlier"]
    assert (earlier["commit"], earlier["num_runs"]) == ("before", len(kept))
    text = convergence_doc.make_part(extended)
    assert f"- {len(kept)} runs. Measured" in text and "- 2 runs. Measured" in text
    assert "for the two looks" not in convergence_doc.make_part(record)

    (picture := tmp_path / "convergence_quick.svg").unlink()
    run_main(monkeypatch, tmp_path, "--extend")  # the same command again: nothing is missing
    assert picture.exists()
    again = json.loads(path.read_text())
    assert (again["runs"], again["earlier"]) == (extended["runs"], extended["earlier"])


def test_runs_of_another_task_are_not_taken_from_the_record(tmp_path: Path) -> None:
    recorded = [{"task": "other", "seed": 0}, {"task": "this", "seed": 1}]
    with open_runs(tmp_path / "runs.jsonl", "this", fresh=False, recorded=recorded) as file:
        assert [run["seed"] for run in file.all_runs] == [1]


def test_the_page_shows_what_the_record_says(tmp_path: Path) -> None:
    page = "before\n<!-- begin: convergence -->\n<!-- end: convergence -->\nafter\n"
    path = tmp_path / "convergence.json"
    assert convergence_doc.NOT_RUN in convergence_doc.make_doc(page, path)
    path.write_text(json.dumps(make_result(shift([0.1, -0.2, 0.3, 0.0, -0.1]), [10.0] * 5)))
    text = convergence_doc.make_doc(page, path)
    assert convergence_doc.NOT_RUN not in text
    assert "| +0.02 (-0.16 to +0.20) |" in text
    assert "| equivalent within 1.5 points |" in text
    assert convergence_doc.make_doc(text, path) == text


def test_the_training_page_is_up_to_date_and_promises_no_more() -> None:
    text = convergence_doc.DOC.read_text()
    assert convergence_doc.make_doc(text, RESULTS / "convergence.json") == text
    assert "not yet shown on the real ImageNet" in " ".join(text.split())
