"""Stages beside the published ones, curves, time to accuracy, and where numbers come from."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from report.curves import accuracy_table, learning_charts, load_epochs, time_to_accuracy
from report.provenance import run_table, settings_tables
from report.runs import load_runs
from report.scaling import build_studies
from report.stages import load_stages, read_published_stages, stage_table, summarise_stages
from tests.report.records import write_run
from train.records.stage_meter import measure_stage


def test_measured_stages_are_tabulated_beside_the_published(tmp_path: Path) -> None:
    for stage in ("extract", "train", "train"):
        with measure_stage(stage, tmp_path):
            (tmp_path / "some.bin").write_bytes(bytes(3_000_000))
    records, notes = load_stages([tmp_path])
    assert notes == []
    table = stage_table(summarise_stages(records), read_published_stages())
    assert table is not None
    headings = [column.heading for column in table.columns]
    assert headings[3:7] == ["I/O Read (MB)", "I/O Write (MB)", "Avg. CPU (%)", "Peak Memory (GB)"]
    rows = [[cell.text for cell in row] for row in table.rows]
    ours = [row for row in rows if row[1] == "this one"]
    assert [row[0] for row in ours] == ["preprocess", "train"]
    assert [row[-1] for row in ours] == ["1", "2"]
    assert all(float(row[4]) >= 3.0 for row in ours)
    published = next(row for row in rows if row[:3] == ["train", "galaxy (published)", "images"])
    assert published[3:10] == ["543.62", "1489.55", "789.51", "18.80", "68.92", "4.13", "1453.53"]
    assert [row[0] for row in rows] == sorted(
        (row[0] for row in rows), key=["preprocess", "hpo", "train", "evaluate"].index
    )


def test_failed_stages_do_not_count_and_torn_lines_are_noted(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no"), measure_stage("fetch", tmp_path):
        raise ValueError("no")
    with open(tmp_path / "stages.jsonl", "a") as file:
        file.write('{"stage": "train", "sec')
    records, notes = load_stages([tmp_path])
    assert summarise_stages(records) == []
    assert notes == [f"{tmp_path / 'stages.jsonl'}: 1 torn line left out"]


def test_time_to_accuracy_adds_training_and_evaluation() -> None:
    lines = [
        {"epoch": e, "seconds": 10.0, "eval_s": 2.0, "val_acc1": a}
        for e, a in enumerate((20, 50, 60))
    ]
    assert time_to_accuracy(lines, 50) == (24, 2)
    assert time_to_accuracy(lines, 70) is None


def test_target_is_what_every_run_reached(tmp_path: Path) -> None:
    write_run(tmp_path, "one", 1)  # its epochs reach 20.75 and 41.5 %
    write_run(tmp_path, "two", 2)
    runs, _ = load_runs([tmp_path])
    epochs, _ = load_epochs(runs)
    table = accuracy_table(build_studies(runs), epochs)
    assert table is not None
    assert table.caption == "Time to 41 % val acc@1"
    assert [row[3].value for row in table.rows] == [110 + 2, 60 + 2]
    missed = accuracy_table(build_studies(runs), epochs, target=90)
    assert missed is not None
    assert [row[3].text for row in missed.rows] == ["not reached", "not reached"]


def test_torn_epoch_lines_are_noted_and_the_rest_is_drawn(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "one")
    with open(folder / "epochs.jsonl", "a") as file:
        file.write('{"epoch": 2, "train_lo')
    runs, _ = load_runs([tmp_path])
    epochs, notes = load_epochs(runs)
    assert len(epochs["one"]) == 2
    assert notes == [f"{folder / 'epochs.jsonl'}: 1 torn line left out"]
    charts, _ = learning_charts(build_studies(runs), epochs)
    assert [chart.name for chart in charts] == ["loss", "accuracy"]


def test_curves_of_the_same_size_are_told_apart_by_the_name_of_the_run(tmp_path: Path) -> None:
    write_run(tmp_path, "one", 1)
    write_run(tmp_path, "two", 1, config={"lr": 7.0})
    write_run(tmp_path, "four", 4)
    runs, _ = load_runs([tmp_path])
    charts, _ = learning_charts(build_studies(runs), load_epochs(runs)[0])
    for chart in charts:
        labels = re.findall(r">([^<>]*, batch [^<>]*)<", chart.svg)
        assert len(labels) == len(set(labels)) == 3
        assert [any(name in label for label in labels) for name in ("one", "two", "four")] == [
            True,
            True,
            False,
        ]


def test_settings_that_differ_are_apart_from_those_that_are_shared(tmp_path: Path) -> None:
    write_run(tmp_path, "one", 1)
    write_run(tmp_path, "two", 2, config={"precision": "bf16"})
    runs, _ = load_runs([tmp_path])
    differing, shared = settings_tables(runs)
    values = {row[0].text: row[1].text for row in differing.rows}
    assert values["precision"] == "fp32 (1 run); bf16 (1 run)"
    assert "arch" in {row[0].text for row in shared.rows}
    table = run_table(runs)
    assert table is not None
    assert json.loads(json.dumps([row[0].value for row in table.rows])) == ["one", "two"]
