"""The arithmetic of the trainer's benchmarks, and the tables that docs/performance.md shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Collection
from typing import Any

import pytest

from benchmarks import (
    bench,
    ddp,
    epoch_overhead,
    loader,
    memory,
    startup_exchange,
    step,
    time_to_first_step,
)
from benchmarks.bench import RESULTS, format_table, median_ratio
from benchmarks.machine_load import own_s
from benchmarks.performance_doc import DOC, MAKERS
from dataset.errors import UserError


def test_a_ratio_compares_neighbours_in_time() -> None:
    """A minute that is ten times slower for both does not change it."""
    assert median_ratio([2.0, 20.0, 2.2], [1.0, 10.0, 1.0]) == 2.0


def test_a_disturbed_measurement_is_made_again_and_the_quietest_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The load of others is given by the test: a busy machine cannot be had on demand."""

    class FakeLoad:
        shares = iter([0.9, 0.5, 0.7, 0.0, 0.3, 0.4, 0.5])

        def __init__(self, servers: Collection[int]) -> None:
            pass

        def foreign_share(self) -> float:
            return next(self.shares)

    monkeypatch.setattr(bench, "MachineLoad", FakeLoad)
    monkeypatch.setattr(bench, "QUIET_S", 0.0)
    values = iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    assert bench.measure_undisturbed(lambda: next(values)) == 2.0  # after three tries
    assert bench.measure_undisturbed(lambda: next(values)) == 4.0  # at once
    found = bench.interleave_with_shares({"a row": lambda: next(values)}, 1)
    assert found == ({"a row": [5.0]}, {"a row": [0.3]})


def test_a_row_of_loaders_that_others_disturbed_says_so() -> None:
    """The committed record may be of before, without the shares."""
    record = json.loads((RESULTS / "loader.json").read_text())
    record.pop("others_share", None)
    plain = loader.tables(record)
    quiet, loud = list(record["train"])[:2]
    record["others_share"] = {"train": {quiet: [0.0, 0.2], loud: [0.0, 0.31]}}
    marked = loader.tables(record)
    assert plain[1:] == marked[1:] and plain[0][2][0] == marked[0][2][0]
    assert marked[0][2][1][0] == f"{loud} (disturbed: 31%)"
    assert marked[0][2][1][1:] == plain[0][2][1][1:]


def test_the_work_of_a_child_is_not_that_of_others() -> None:
    before_s = own_s([os.getpid()])
    code = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-S", "-c", code], check=True)
    assert own_s([os.getpid()]) - before_s > 0.25


def test_the_fixed_cost_is_what_an_epoch_has_beside_its_steps() -> None:
    """Steps of 1 s, validation of 0.5 s; 3 s are lost before it and 4 s before the next epoch."""
    marks, now_s = [], 100.0
    for _ in range(3):
        now_s += 3.0  # on top of the first step's own second
        for kind, count, step_s, late_s in (("train", 6, 1.0, 0.0), ("val", 4, 0.5, 4.0)):
            now_s += late_s
            for _ in range(count):
                now_s += step_s
                marks.append((kind, now_s))
    costs = epoch_overhead.fixed_costs(marks)
    assert len(costs) == 2  # the last epoch has no next one
    assert [cost["fixed_s"] for cost in costs] == pytest.approx([7.0, 7.0])
    assert [cost["steps_s"] for cost in costs] == pytest.approx([8.0, 8.0])


@pytest.mark.parametrize("flags", [{"images_per_class": 31}, {"rounds": 0}])
def test_a_loader_without_a_timed_batch_is_refused(flags: dict[str, Any]) -> None:
    """One batch of validation has no rate, and a ratio to it no value."""
    with pytest.raises(UserError, match="at least 1 round and 32 images, for two batches of 64"):
        loader.LoaderFlags(**flags)
    assert loader.LoaderFlags(rounds=1, images_per_class=32).images_per_class == 32


def test_growth_leaves_out_the_first_quarter_and_sees_a_leak() -> None:
    flat = [10.0] * 5 + [100.0] * 15
    assert memory.growth(flat) == 1.0
    leak = [100.0 + 2 * epoch for epoch in range(20)]
    assert (memory.growth(leak) or 0) > memory.TARGET
    assert memory.growth([0.0] * 20) is None  # no workers


def test_shares_of_two_ranks_are_named_for_what_they_are() -> None:
    ways = (ddp.SYNCED, ddp.APART, ddp.ALONE)
    seconds = {f"{name}: {way}": [1.0, 1.0] for name in ("ours", "reference") for way in ways}
    seconds[f"ours: {ddp.ALONE}"] = [0.9, 0.9]
    seconds[f"reference: {ddp.SYNCED}"] = [1.25, 0.8]
    result = {"arch": "x", "batch_per_rank": 8, "rounds": 2, "seconds": seconds}
    _, (_, _, rows) = ddp.tables(result)
    assert rows == [
        ["no_sync / sync", "100.0%", "102.5%", "1.02x (tie)", "at least 92%"],
        ["1 rank / 2 ranks", "90.0%", "102.5%", "0.92x (tie)", ""],
    ]


@pytest.mark.parametrize(("task", "other"), list(zip(step.TASKS, ("without", "with"), strict=True)))
def test_each_way_of_the_step_turns_one_measure(task: step.Task, other: str) -> None:
    ways = step.name_ways(task, use_compile=True)
    own = ways[step.OURS]
    assert f"ours {other} channels_last" in ways
    for name, measures in ways.items():
        if name not in (step.REFERENCE, step.OURS):
            assert len(vars(own).items() - vars(measures).items()) == 1


@pytest.mark.parametrize(("shape", "each_s"), [("rank", 0.2), ("pair of ranks", 0.03)])
def test_the_start_up_exchange_is_fitted_by_the_shape_that_it_has(
    shape: str, each_s: float
) -> None:
    size = startup_exchange.SHAPES[shape]
    fit = startup_exchange.fit_seconds({n: 0.3 + each_s * size(n) for n in (2, 4, 8, 16)})
    assert fit.shape == shape
    assert (fit.fixed_s, fit.each_s) == pytest.approx((0.3, each_s))


def test_the_page_has_a_place_for_every_table() -> None:
    text = DOC.read_text()
    assert re.findall(r"<!-- begin: (\w+) -->", text) == list(MAKERS)
    assert re.findall(r"<!-- end: (\w+) -->", text) == list(MAKERS)


def test_a_table_is_markdown_under_its_title() -> None:
    assert format_table("T", ["a", "b"], [["1", "2"]]) == "T\n\n| a | b |\n|---|---|\n| 1 | 2 |"


def test_the_imports_are_read_from_what_python_says() -> None:
    log = "import time:       100 |        200 |   train.runner\n"
    log += "import time:     12345 |    3400000 | train.run\nimport time: 1 | 2 | other\n"
    assert time_to_first_step.seconds_of_import(log, "train.run") == 3.4
