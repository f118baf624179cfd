"""Logs of pytorch/examples as runs: every format, mixed ranks, resumes, damage, what is missing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dataset.errors import UserError
from report.curves import learning_charts, load_epochs
from report.example_logs import WALL_CLOCK
from report.phases import phase_shares
from report.runs import ReportedRun, load_runs
from report.scaling import build_studies
from scripts.report import sort_inputs
from tests.report.example_log_lines import YEARS, print_result, print_run

HEADING = "gpu,batch_size,num_nodes,num_gpus,lr,log"


def write_table(folder: Path, *rows: str) -> Path:
    table = folder / "logs.csv"
    table.write_text("\n".join([HEADING, *rows]) + "\n")
    return table


def read(folder: Path, lines: list[str], end: str = "\n") -> tuple[ReportedRun, list[str]]:
    (folder / "a.log").write_text(end.join(lines) + end)
    (run,), notes = load_runs([write_table(folder, "V100,256,1,8,0.1,a.log")])
    assert notes[0] == WALL_CLOCK
    return run, notes[1:]


@pytest.mark.parametrize("year", YEARS)
def test_each_format_of_the_years_gives_the_same_run(tmp_path: Path, year: int) -> None:
    run, notes = read(tmp_path, print_run(year))
    assert notes == []
    assert (run.gpu, run.arch, run.num_gpus, run.batch_size, run.lr) == (
        "V100",
        "resnet50",
        8,
        256,
        0.1,
    )
    assert run.images == 2 * 100 * 256
    assert run.epochs == 2
    assert run.wall_clock_s == pytest.approx(2 * (4.4 + 99 * 0.4 + 20 * 0.5), rel=1e-3)
    assert run.steady_images_per_s == pytest.approx(256 / 0.4, rel=2e-3)
    assert (run.acc1, run.acc5) == (20.0, 31.0)


def test_data_wait_is_a_phase_and_communication_is_not_made_up(tmp_path: Path) -> None:
    run, _ = read(tmp_path, print_run(2019))
    (study,) = build_studies([run])
    shares = phase_shares(study.points[0])
    assert shares["data_wait"] == pytest.approx(2 * 100 * 0.1)
    assert shares["evaluation"] == pytest.approx(2 * 20 * 0.5)
    assert shares["communication"] == 0
    assert sum(shares.values()) == pytest.approx(run.wall_clock_s)


def test_the_curves_show_loss_and_accuracy_by_epoch(tmp_path: Path) -> None:
    run, _ = read(tmp_path, print_run(2022))
    epochs, notes = load_epochs([run])
    assert notes == []
    lines = epochs[run.run_id]
    assert [(line["train_loss"], line["val_acc1"]) for line in lines] == [(7.0, 10.0), (6.0, 20.0)]
    charts, _ = learning_charts(build_studies([run]), epochs)
    assert [chart.name for chart in charts] == ["loss", "accuracy"]


def test_all_ranks_in_one_file_are_averaged_and_not_added(tmp_path: Path) -> None:
    """As with --multiprocessing-distributed into a pipe: each rank writes a block at a time."""
    ranks = [print_run(2022, step_s=0.4 + 0.01 * rank) for rank in range(4)]
    blocks = [[lines[i : i + 7] for i in range(0, len(lines), 7)] for lines in ranks]
    mixed = [line for turn in zip(*blocks, strict=True) for block in turn for line in block]
    run, notes = read(tmp_path, mixed)
    assert notes == []
    assert run.images == 2 * 100 * 256
    assert run.steady_images_per_s == pytest.approx(256 / 0.415, rel=2e-3)
    assert (run.acc1, run.acc5) == (20.0, 31.0)


def test_what_a_resume_repeats_counts_once(tmp_path: Path) -> None:
    whole = print_run(2022, epochs=3)
    second = whole.index(next(line for line in whole if line.startswith("Epoch: [1]")))
    loaded = "=> loaded checkpoint 'checkpoint.pth.tar' (epoch 1)"
    lost = [line.replace("Loss 6.0", "Loss 9.9") for line in whole[second : second + 4]]
    run, notes = read(tmp_path, [*whole[:second], *lost, whole[0], loaded, *whole[second:]])
    assert run.images == 3 * 100 * 256
    assert run.epoch_lines is not None
    assert [line["train_loss"] for line in run.epoch_lines] == [7.0, 6.0, 5.0]
    assert notes == [f"{tmp_path}/a.log: resumed at epoch 1; what was trained twice counts once"]


def test_noise_torn_lines_and_bars_do_no_harm(tmp_path: Path) -> None:
    clean = print_run(2022)
    clean_run, _ = read(tmp_path, clean)
    noisy: list[str] = []
    for line in clean:
        noisy += [" 12%|#2        | 3/25 [00:01<00:09]\r" + line, "UserWarning: x", f"0: {line}"]
    torn = clean[5][:30] + clean[6]  # a rank died in its line, and another one wrote on
    run, notes = read(tmp_path, [*noisy[:20], torn, "\x00\xff", *noisy[20:]])
    assert notes == [f"{tmp_path}/a.log: 1 torn line left out"]
    assert (run.images, run.acc1) == (clean_run.images, clean_run.acc1)
    assert run.wall_clock_s == pytest.approx(clean_run.wall_clock_s)


def test_a_log_that_breaks_off_counts_up_to_its_last_line(tmp_path: Path) -> None:
    run, notes = read(tmp_path, print_run(2022)[:5])  # the model, then 1, 11, 21 and 31
    assert run.images == 31 * 256
    assert notes == [f"{tmp_path}/a.log ends in epoch 0, after 31 of 100 batches"]
    assert run.is_done and run.acc1 is None and run.epoch_lines == []


def test_a_loss_that_is_nan_is_absent(tmp_path: Path) -> None:
    lines = [line.replace("7.0000e+00", "nan") for line in print_run(2022)]
    run, _ = read(tmp_path, lines)
    assert run.epoch_lines is not None
    assert "train_loss" not in run.epoch_lines[0] and "train_loss" in run.epoch_lines[1]


def test_any_damage_gives_a_run_or_one_line(tmp_path: Path) -> None:
    rng = random.Random(0)
    text = "\n".join(print_run(2019, epochs=1, num_batches=30))
    for _ in range(200):
        at = rng.randrange(len(text))
        damaged = text[:at] + rng.choice(["", "\n", "9" * 12, "[", "\x00"]) + text[at + 9 :]
        run, _ = read(tmp_path, [damaged])
        assert run.images and run.wall_clock_s


def test_logs_of_several_sizes_are_a_scaling_study(tmp_path: Path) -> None:
    for num_gpus, step_s in ((1, 0.4), (2, 0.42), (4, 0.5)):
        lines = print_run(2022, num_batches=200 // num_gpus, step_s=step_s, first_s=step_s)
        (tmp_path / f"{num_gpus}.log").write_text("\n".join(lines))
    rows = [f"V100,{64 * n},1,{n},,{n}.log" for n in (1, 2, 4)]
    runs, _ = load_runs([write_table(tmp_path, *rows)])
    (study,) = build_studies(runs)
    assert study.mode == "weak"
    steady = [p.steady_efficiency_pct.mean for p in study.points if p.steady_efficiency_pct]
    assert steady == pytest.approx([100, 100 * 0.4 / 0.42, 100 * 0.4 / 0.5], rel=3e-3)
    assert [point.flags for point in study.points] == [(), (), ()]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("V100,,1,8,0.1,a.log", "logs.csv:2: batch_size is None"),
        ("V100,256,1,x,0.1,a.log", "logs.csv:2: num_gpus is 'x', not a number"),
        ("V100,256,1,8,0.1,b.log", "b.log; name it as seen from the CSV's folder"),
        ("V100,256,1,8,0.1,", "name it as seen from the CSV's folder"),
        ("V100,256,1,8,0.1,other.log", "other.log has no line such as 'Epoch: [0][10/5005]"),
    ],
)
def test_what_the_log_does_not_say_must_be_said(tmp_path: Path, row: str, words: str) -> None:
    (tmp_path / "a.log").write_text("\n".join(print_run()))
    (tmp_path / "other.log").write_text("Epoch 1, loss 3\n" + print_result(2022, 1, 2))
    with pytest.raises(UserError) as error:
        load_runs([write_table(tmp_path, row)])
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_bare_log_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("\n".join(print_run()))
    for ask in (lambda: load_runs([log]), lambda: sort_inputs([log])):
        with pytest.raises(UserError, match="says neither its batch size nor its GPUs"):
            ask()
