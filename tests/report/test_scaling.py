"""Scaling studies from records: the formula, the baselines, the flags, the predictions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dataset.errors import UserError
from report.phases import lost_by_phase, phase_shares, sentences
from report.runs import load_runs, run_from_record, short_device
from report.scaling import Study, build_studies
from report.scaling_tables import PUBLISHED_COLUMNS, scaling_table, to_hms
from report.table import to_csv, to_markdown
from tests.history import assert_is_in_history
from tests.report.records import EXAMPLE, KEMPNER, ROOT, run_record, write_raw, write_run


def studies_of(*records: dict[str, object], predict: tuple[int, ...] = ()) -> list[Study]:
    runs = [run_from_record(record, f"folder/{record['run_id']}") for record in records]
    return build_studies(runs, predict)


def test_published_table_reproduces_to_the_last_digit() -> None:
    runs, _ = load_runs([KEMPNER])
    (study,) = build_studies(runs)
    lines = to_csv([scaling_table(study)]).splitlines()
    ours = [",".join(line.split(",")[: len(PUBLISHED_COLUMNS)]) for line in lines]
    assert ours == KEMPNER.read_text().splitlines()


def test_the_manual_shows_the_table_that_the_code_computes() -> None:
    """Made by: scripts/scaling_table.py run_results/published/kempner_a100.csv --epochs 90"""
    (study,) = build_studies(load_runs([KEMPNER], epochs=90)[0])
    manual = (ROOT / "docs" / "studies.md").read_text()
    shown = manual.partition("<!-- published table -->\n")[2]
    assert shown.partition("\n<!-- end of")[0] == to_markdown(scaling_table(study)).rstrip()


def test_the_readme_shows_the_table_of_its_record() -> None:
    """Made by: scripts/scaling_table.py run_results/cpu/two-core-example"""
    (study,) = build_studies(load_runs([EXAMPLE])[0])
    shown = (ROOT / "README.md").read_text().partition("<!-- begin: two-core-example -->\n")[2]
    assert shown.partition("\n<!-- end")[0] == to_markdown(scaling_table(study)).rstrip()
    assert [len(point.done) for point in study.points] == [3, 3]
    (commit,) = {run.record["commit"] for point in study.points for run in point.done}
    assert_is_in_history(commit)
    assert (EXAMPLE / "study.json").exists()


def test_published_128_gpu_row_is_predicted_with_an_interval_and_marked() -> None:
    (study,) = build_studies(load_runs([KEMPNER], epochs=90)[0])
    point = study.points[-1]
    assert point.num_gpus == 128
    assert "predicted" in point.flags
    assert point.efficiency_pct is None
    interval = point.predicted_efficiency_pct
    assert interval is not None and interval.low is not None and interval.high is not None
    assert interval.low < interval.value < interval.high < 76.76
    row = scaling_table(study).rows[-1]
    assert row[9].text.startswith("*") and "–" in row[9].text


def test_published_loss_is_said_in_plain_words() -> None:
    (study,) = build_studies(load_runs([KEMPNER], epochs=90)[0])
    assert sentences(study)[0].startswith("23 % of the 64-GPU epoch is a fixed cost of 6.9 s")


def test_a_cost_that_grows_is_named_with_its_run_where_none_is_fixed() -> None:
    """Two epochs take 720/N + 13 log2(N) s: 129 s on 8 processes, 39 s of them for doublings."""
    times = {1: 720.0, 2: 373.0, 4: 206.0, 8: 129.0}
    (study,) = studies_of(*(run_record(str(n), n, wall_clock_s=s) for n, s in times.items()))
    says = "30 % of the 8-process epoch grows by 6.5 s with each doubling"
    assert sentences(study)[0].startswith(says)


def test_published_rows_of_another_learning_rate_rule_are_flagged() -> None:
    (study,) = build_studies(load_runs([KEMPNER])[0])
    flagged = [p.num_gpus for p in study.points if any("LR" in flag for flag in p.flags)]
    assert flagged == [16, 32, 64, 128]


def test_efficiency_is_of_images_a_second_where_the_images_differ() -> None:
    """Two GPUs trained half the images in 30 s: 100 images/s on 2 against 40 x 2."""
    one = run_record("a", 1, wall_clock_s=100.0, images_trained=4000)
    two = run_record("b", 2, wall_clock_s=40.0, images_trained=2000)
    (study,) = studies_of(one, two)
    assert study.points[1].efficiency_pct is not None
    assert study.points[1].efficiency_pct.mean == pytest.approx(100 * 50 / (2 * 40))


def test_steady_efficiency_leaves_start_up_out() -> None:
    one = run_record("a", 1, wall_clock_s=110.0)  # 10 s of start-up each
    two = run_record("b", 2, wall_clock_s=60.0)
    (study,) = studies_of(one, two)
    point = study.points[1]
    assert point.steady_efficiency_pct is not None and point.efficiency_pct is not None
    assert point.steady_efficiency_pct.mean == pytest.approx(100)
    assert point.efficiency_pct.mean == pytest.approx(100 * 110 / 120)


def test_another_baseline_than_one_gpu_is_labelled() -> None:
    (study,) = studies_of(run_record("a", 2), run_record("b", 4))
    assert study.points[0].efficiency_pct is not None
    assert study.points[0].efficiency_pct.mean == pytest.approx(100)
    table = scaling_table(study)
    assert "baseline 2 processes" in table.caption
    assert any("the baseline is 2 processes" in note for note in table.notes)


def test_repeats_give_a_mean_and_a_spread() -> None:
    records = [run_record(f"r{i}", 1, wall_clock_s=100.0 + 10 * i) for i in range(3)]
    (study,) = studies_of(*records)
    (point,) = study.points
    assert point.wall_clock_s is not None
    assert (point.wall_clock_s.mean, point.wall_clock_s.count) == (110, 3)
    assert point.wall_clock_s.std == pytest.approx(10)
    assert scaling_table(study).rows[0][5].text == "110 ± 10.0"


def test_weak_and_strong_points_of_one_baseline_are_two_studies() -> None:
    weak = run_record("w", 2)
    strong = run_record("s", 2, config={"batch_size": 32})
    found = studies_of(run_record("one", 1), weak, strong)
    assert sorted(study.mode for study in found) == ["strong", "weak"]
    assert all(len(study.points) == 2 for study in found)


def test_other_recipe_data_code_and_precision_are_flagged() -> None:
    other = run_record(
        "b",
        2,
        config={"precision": "bf16"},
        commit="1234567",
        dataset={"fingerprint": "f2"},
        versions={"python": "3.11.7", "torch": "2.14.0"},
    )
    (study,) = studies_of(run_record("a", 1), other)
    flags = " ".join(study.points[1].flags)
    assert "precision bf16 (baseline fp32)" in flags
    assert "code 1234567 (baseline abcdef0)" in flags
    assert "data f2 (baseline f1)" in flags
    assert "torch 2.14.0 (baseline 2.15.0)" in flags
    assert study.points[0].flags == ()


def test_rows_that_differ_in_their_order_are_flagged() -> None:
    """A record from before there was --order is uniform; the window grows with the batch."""
    data = {"path": "data", "fingerprint": "f1", "num_train": 1000, "num_classes": 10}

    def record(num: int, order: str, units: str | None = None) -> dict[str, Any]:
        cuts = {"units": units, "window": 512 * num} if units else {}
        return run_record(str(num), num, config={"order": order}, dataset=data | cuts)

    (study,) = studies_of(run_record("old", 1), record(2, "uniform"), record(4, "streamed", "a"))
    assert [point.flags for point in study.points] == [
        (),
        (),
        ("order streamed (baseline uniform)",),
    ]
    one, two, four = (
        record(1, "streamed", "a"),
        record(2, "streamed", "a"),
        record(4, "streamed", "b"),
    )
    (study,) = studies_of(one, two, four)
    assert [point.flags for point in study.points] == [(), (), ("units b (baseline a)",)]
    two["dataset"]["lanes"] = 2
    (study,) = studies_of(one, two)
    assert [point.flags for point in study.points] == [(), ("lanes 2 (baseline 1)",)]


def test_an_lr_scaled_with_the_batch_in_every_row_is_one_recipe() -> None:
    records = [run_record(f"r{n}", n, config={"lr": 0.1 * n}) for n in (1, 2, 4)]
    (study,) = studies_of(*records)
    assert all(point.flags == () for point in study.points)


def test_a_failed_point_is_predicted_and_says_that_it_failed() -> None:
    failed = run_record("c", 4, status="failed", exit_code=4)
    (study,) = studies_of(run_record("a", 1), run_record("b", 2), failed)
    point = study.points[2]
    assert point.efficiency_pct is None
    assert set(point.flags) == {"predicted", "failed"}
    assert point.predicted_s is not None
    assert point.predicted_s.value == pytest.approx(35)


def test_a_size_can_be_asked_for() -> None:
    (study,) = studies_of(*(run_record(f"r{n}", n) for n in (1, 2, 4)), predict=(8,))
    assert study.points[-1].num_gpus == 8
    assert study.points[-1].first.batch_size == 256
    assert study.points[-1].predicted_s is not None


def test_a_resumed_run_says_how_many_attempts_it_took() -> None:
    attempts = [{"seconds": 30.0}, {"seconds": 30.0}]
    (study,) = studies_of(run_record("a", 1), run_record("b", 2, attempts=attempts))
    assert study.points[1].flags == ("2 attempts",)


def test_a_study_of_one_size_says_that_it_needs_a_second() -> None:
    (study,) = studies_of(run_record("a", 1))
    assert study.fit is None
    assert "only one size was measured" in scaling_table(study).notes[0]


def test_phases_that_grow_add_up_to_the_loss() -> None:
    one = run_record("a", 1, wall_clock_s=110.0)
    two = run_record("b", 2, wall_clock_s=70.0, phases={"data_wait": 8.0, "compute": 52.0})
    (study,) = studies_of(one, two)
    lost = lost_by_phase(study.points[1], study.points[0])
    efficiency = study.points[1].efficiency_pct
    assert efficiency is not None
    assert sum(lost.values()) == pytest.approx(100 * (100 / efficiency.mean - 1))
    assert lost["data_wait"] == pytest.approx(100 * 16 / 110)
    assert phase_shares(study.points[1])["data_wait"] == 8
    assert "27.3 % more process time" in sentences(study)[-1]
    assert "data wait +14.5, start-up +9.1, compute +3.6, the rest +0.1" in sentences(study)[-1]


def test_the_named_phases_of_a_loss_add_up_to_it() -> None:
    one = run_record("a", 1, wall_clock_s=110.0)
    phases = {"communication": 8.0, "compute": 45.0, "checkpoint": 0.4, "other": 0.3}
    two = run_record("b", 2, wall_clock_s=63.7, phases=phases)
    (study,) = studies_of(one, two)
    sentence = sentences(study)[-1]
    total = re.search(r"needs ([\d.]+) % more", sentence)
    assert total is not None and "the rest" in sentence and "compute -" in sentence
    parts = re.findall(r" ([+-][\d.]+)", sentence)
    assert sum(map(float, parts)) == pytest.approx(float(total[1]), abs=1e-6)


def test_no_runs_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no runs found"):
        load_runs([tmp_path])


def test_unreadable_runs_are_left_out_with_a_note(tmp_path: Path) -> None:
    write_run(tmp_path, "good")
    write_raw(tmp_path / "newer", run_record("newer") | {"schema": 99})
    write_raw(tmp_path / "torn", '{"schema": 1, "run_id": ')
    write_raw(tmp_path / "empty_world", run_record("empty_world", world_size=0))
    write_raw(tmp_path / "text", run_record("text", world_size="two"))
    write_raw(tmp_path / "idle", run_record("idle", images_trained=0))
    runs, notes = load_runs([tmp_path])
    assert [run.run_id for run in runs] == ["good"]
    assert len(notes) == 5
    assert any("images_trained is 0 in a run that is done" in note for note in notes)
    assert any("schema 99" in note for note in notes)
    assert any("world_size is 0" in note for note in notes)


def test_two_runs_with_one_id_count_once(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "same", wall_clock_s=50.0, images_trained=1000)
    write_run(tmp_path / "b", "same", wall_clock_s=100.0)
    runs, notes = load_runs([tmp_path])
    assert [run.wall_clock_s for run in runs] == [100.0]
    assert "run same is there twice" in notes[0]


@pytest.mark.parametrize(
    ("device", "short"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("A100", "A100"),
        ("cpu", "cpu"),
    ],
)
def test_device_names_are_short(device: str, short: str) -> None:
    assert short_device(device) == short


def test_hours_minutes_seconds() -> None:
    assert [to_hms(s) for s in (129686, 2640, 59.6, 400000)] == [
        "36:01:26",
        "00:44:00",
        "00:01:00",
        "111:06:40",
    ]
