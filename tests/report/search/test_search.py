"""A search on the page: its trials, pictures and importances, its place among the stages."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dataset.durable import write_json
from report.page import Contents, build_page
from report.runs import load_runs
from report.search.charts import search_charts
from report.search.importance import find_common_epoch, find_importances
from report.search.tables import importance_table, trial_table
from report.search.trials import find_best, load_search, name_trial
from report.stages import load_stages, read_published_stages, stage_table, summarise_stages
from report.table import Table
from report.workflows import PLACEMENTS, WORKFLOWS, placement_table, workflow_table
from tests.report.records import run_record, write_run
from tests.report.searches import trial_record, write_search
from train.records.record import RUN_FILE, STAGES_FILE, append_line


def test_trials_are_read_and_the_best_stands_first(tmp_path: Path) -> None:
    search, notes = load_search(write_search(tmp_path / "s"))
    assert notes == [] and len(search.trials) == 10
    best = find_best(search.trials, "acc1")
    assert best is not None and best.number == 5
    table = trial_table(search.trials, "acc1", "title")
    rows = [[cell.text for cell in row] for row in table.rows]
    assert rows[0][:4] == ["5", "best", "90", "2"]
    assert [row[1] for row in rows[-2:]] == ["pruned", "pruned"]


def test_a_loss_has_its_least_value_first(tmp_path: Path) -> None:
    search, _ = load_search(write_search(tmp_path / "s", metric="val_loss"))
    best = find_best(search.trials, search.metric)
    assert best is not None and best.value == min(
        trial.value or 0.0 for trial in search.trials if trial.state == "complete"
    )


def test_the_flag_that_matters_is_the_most_important(tmp_path: Path) -> None:
    search, _ = load_search(write_search(tmp_path / "s"))
    assert find_common_epoch(search) == 1
    importances = find_importances(search)
    assert next(iter(importances)) == "lr" and sum(importances.values()) == pytest.approx(1.0)
    table = importance_table(search, importances)
    assert table is not None and "10 trials after epoch 1" in table.notes[0]


def test_importance_needs_trials_that_differ_and_optuna(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, _ = load_search(write_search(tmp_path / "few", 7))
    assert find_importances(few) == {}
    search, _ = load_search(write_search(tmp_path / "s"))
    alike = [replace(trial, value=1.0, reports={1: 1.0}) for trial in search.trials]
    assert find_importances(replace(search, trials=alike)) == {}
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert find_importances(search) == {} and importance_table(search, {}) is None
    assert [chart.name for chart in search_charts(search, {})] == ["history", "parallel"]


def test_pictures_show_each_trial(tmp_path: Path) -> None:
    search, _ = load_search(write_search(tmp_path / "s"))
    history, parallel, importance = search_charts(search, find_importances(search))
    assert "stopped early" in history.svg and "best so far" in history.svg
    for text in ("lr", "0.01", "10", "sgd", "lars", "acc1", "90"):
        assert f">{text}<" in parallel.svg
    assert ">recipe<" in importance.svg
    assert search_charts(replace(search, trials=search.trials[:1]), {}) == []


def test_the_page_has_the_search_and_no_trial_among_the_runs(tmp_path: Path) -> None:
    folder = write_search(tmp_path / "s")
    write_run(folder, "trial0099")
    (folder / "trial0099" / "trial.json").write_text(json.dumps(trial_record(99)))
    write_run(tmp_path, "one")
    runs, _ = load_runs([tmp_path])
    assert [run.run_id for run in runs] == ["one"]
    search, notes = load_search(folder)
    assert len(notes) == 1 and "lr is" in notes[0]  # drawn outside of its range
    page = build_page(Contents("title", runs=runs, searches=[search]))
    assert 'id="search"' in page and "best acc1 of 10 trials" in page
    assert "Trials of the search s" in page


@pytest.mark.parametrize(
    "changes",
    [
        {"distributions": {"lr": "[", "wd": "{}", "recipe": "{}"}},
        {"params": {"lr": 11.0, "wd": 0.0, "recipe": "sgd"}},
        {"params": {"lr": 1.0, "wd": 0.0, "recipe": "adam"}},
        {"reports": [1]},
        {"value": True},
    ],
)
def test_a_damaged_trial_is_left_out_with_a_note(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    folder = write_search(tmp_path / "s", 3)
    (folder / "trial0001" / "trial.json").write_text(json.dumps(trial_record(1, **changes)))
    search, notes = load_search(folder)
    assert len(search.trials) == 2 and len(notes) == 1
    assert str(folder / "trial0001" / "trial.json") in notes[0]


def test_the_trials_of_another_space_are_left_out_with_a_note(tmp_path: Path) -> None:
    folder = write_search(tmp_path / "s", 2)
    other = trial_record(2, params={}, distributions={})
    (folder / "trial0002").mkdir()
    (folder / "trial0002" / "trial.json").write_text(json.dumps(other))
    search, notes = load_search(folder)
    assert len(search.trials) == 2 and "1 trial of another space left out" in notes[0]


def write_stages(folder: Path) -> None:
    for seconds, cpu_pct in ((10.0, 100.0), (30.0, 200.0)):
        record = {"stage": "train", "seconds": seconds, "cpu_pct": cpu_pct, "bytes_read": 2e9}
        append_line(folder / "stages.jsonl", record | {"peak_rss_bytes": 1e9 * seconds})


def test_a_search_fills_the_row_of_tuning_among_the_stages(tmp_path: Path) -> None:
    folder = write_search(tmp_path / "s", 2)
    for name in ("trial0000", "trial0001"):
        write_stages(folder / name)
    write_run(tmp_path, "one")
    write_stages(tmp_path / "one")
    records, notes = load_stages([tmp_path])
    assert notes == []
    table = stage_table(summarise_stages(records), read_published_stages())
    assert table is not None
    ours = [[cell.value for cell in row] for row in table.rows if row[1].text == "this one"]
    keys = [column.key for column in table.columns]
    hpo, train = (dict(zip(keys, row, strict=True)) for row in ours)
    assert (hpo["stage"], hpo["step"]) == ("hpo", "search s")
    assert (hpo["io_read_mb"], hpo["avg_exec_s"], hpo["peak_memory_gb"]) == (8000.0, 80.0, 30.0)
    assert hpo["avg_cpu_pct"] == 175.0
    assert (train["stage"], train["num_measured"]) == ("train", 2)


def test_published_workflows_and_placements_are_shown_as_they_are(tmp_path: Path) -> None:
    folder = write_search(tmp_path / "s")
    write_stages(folder / "trial0000")
    search, _ = load_search(folder)
    table = workflow_table([search], load_stages([folder])[0])
    keys = [column.key for column in table.columns]
    ours, *published = (dict(zip(keys, row, strict=True)) for row in table.rows)
    assert (ours["trials"].value, ours["epochs"].value, ours["io_read_gb"].value) == (10, 18, 4.0)
    assert ours["cpu_hours"].value == pytest.approx(70 / 3600)
    for shown, path in ((published, WORKFLOWS), (None, PLACEMENTS)):
        rows = list(csv.DictReader(path.open()))
        found = shown or [
            dict(zip([c.key for c in placement_table().columns], row, strict=True))
            for row in placement_table().rows
        ]
        assert len(found) == len(rows)
        for row, cells in zip(rows, found, strict=True):
            for key in row.keys() - {"workflow", "scenario"}:
                assert cells[key].text == row[key]
    assert "Krawczuk" in table.notes[-1] and "Krawczuk" in placement_table().notes[-1]
    assert [len(found.notes) for found in (table, workflow_table([], []))] == [2, 1]


def fill_trials(folder: Path, runs: Sequence[dict[str, Any] | None], **stage: float) -> Table:
    """The table of a search whose trials have these records and one stage each; None: none."""
    write_search(folder, len(runs))
    for number, run in enumerate(runs):
        trial = folder / name_trial(number)
        if run is not None:
            write_json(trial / RUN_FILE, run_record(trial.name) | run)
        record = {"stage": "train", "seconds": 1800.0, "cpu_pct": 50.0} | stage
        append_line(trial / STAGES_FILE, record)
    return workflow_table([load_search(folder)[0]], load_stages([folder])[0])


def first_row(table: Table) -> dict[str, Any]:
    keys = [column.key for column in table.columns]
    return dict(zip(keys, (cell.value for cell in table.rows[0]), strict=True))


def test_a_search_has_the_batch_size_files_and_gpu_hours_of_its_records(tmp_path: Path) -> None:
    dataset = {"source": "folder", "num_train": 240, "num_val": 60}
    on_two = {"dataset": dataset, "world_size": 2, "device": "NVIDIA A100-SXM4-80GB"}
    row = first_row(fill_trials(tmp_path / "s", [on_two, on_two], gpu_pct=50.0))
    assert (row["input_files"], row["batch_size"], row["gpu_hours"]) == (300, 32, 2.0)
    assert (row["cpu_hours"], row["io_read_gb"]) == (0.5, None)
    small, large = ({"config": {"batch_size": size}} for size in (64, 128))
    row = first_row(fill_trials(tmp_path / "t", [small, None, large]))
    assert (row["batch_size"], row["input_files"]) == ("64, 128", None)
    assert row["gpu_hours"] is None  # on CPUs


@pytest.mark.parametrize(
    "run",
    [
        {"dataset": {"source": "tar", "num_train": 240}, "world_size": "4", "config": 3},
        {"dataset": [], "world_size": None, "device": "A100", "config": {"batch_size": "x"}},
        None,
    ],
)
def test_what_the_records_do_not_tell_is_empty(tmp_path: Path, run: dict[str, Any] | None) -> None:
    row = first_row(fill_trials(tmp_path / "s", [run], gpu_pct=50.0))
    names = ("input_files", "batch_size", "gpu_hours", "container_gb", "io_read_gb", "io_write_gb")
    assert [row[name] for name in names] == [None] * len(names)
