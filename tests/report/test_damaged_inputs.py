"""Damaged records and event logs are a note or one line, never a crash, in every command."""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
from pathlib import Path

import pytest

from dataset.errors import run_command
from report.curves import load_epochs
from report.grid import eventlog_parse
from report.grid.eventlog import read_event_log
from report.grid.history import read_histories
from report.runs import load_runs
from report.stages import load_stages
from tests.report.damage import DEEP, damage_bytes, damage_json, damage_lines
from tests.report.eventlogs import LogWriter, write_event
from tests.report.records import EXAMPLE, KEMPNER, PUBLISHED, run_record, write_raw, write_run
from train.records.record import EPOCHS_FILE, RUN_FILE, STAGES_FILE

DATA = Path(__file__).parent / "data"


def run_script(name: str, *words: str | Path) -> tuple[int, str]:
    """(exit code, stderr's end) of a command in this process; a crash raises."""
    module = importlib.import_module(f"scripts.{name}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [name, *map(str, words)])
        return run_command(module.main), name


def one_line(capsys: pytest.CaptureFixture[str], code: int) -> None:
    """A refusal is one line on stderr."""
    errors = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert len(errors) == (code != 0)


ODD_RECORDS = {
    "config": [],
    "attempts": 3,
    "phases": {"compute": 5},
    "result": "good",
    "dataset": 7,
    "versions": ["3.11"],
    "scheduler": "condor",
    "run_id": {"a": 1},
    "device": 5,
    "exit_code": "two",
}


@pytest.mark.parametrize("name", ODD_RECORDS)
def test_a_field_of_another_type_is_a_note_and_the_rest_is_in_the_table(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_run(tmp_path / "runs", "good")
    write_raw(tmp_path / "runs" / "odd", run_record("odd", 2) | {name: ODD_RECORDS[name]})
    assert run_script("scaling_table", tmp_path / "runs")[0] == 0
    assert f"passed over: {name} is " in caplog.text


def test_fields_of_another_type_are_notes_on_the_page_and_the_rest_is_shown(
    tmp_path: Path,
) -> None:
    """One page with all of them: drawing it is what takes time."""
    write_run(tmp_path / "runs", "good")
    for name, value in ODD_RECORDS.items():
        odd = f"odd-{name}"
        write_raw(tmp_path / "runs" / odd, run_record(odd, 2) | {name: value})
    page = tmp_path / "page.html"
    assert run_script("report", tmp_path / "runs", "--out", page)[0] == 0
    text = page.read_text()
    assert [name for name in ODD_RECORDS if f"passed over: {name} is " not in text] == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("digits", '{"schema": 1, "world_size": ' + "9" * 400 + "}"),
        ("more digits", '{"schema": 1, "world_size": ' + "9" * 5000 + "}"),
        ("Infinity", '{"schema": 1, "wall_clock_s": Infinity}'),
        ("1e999", '{"schema": 1, "wall_clock_s": 1e999}'),
        ("deep", '{"schema": 1, "config": ' + "[" * DEEP + "]" * DEEP + "}"),
        ("less deep", '{"schema": 1, "config": ' + "[" * 500 + "]" * 500 + "}"),
        ("bytes", "\udcff\udcfe"),
    ],
)
def test_a_record_that_is_no_plain_json_is_left_out_by_name(
    tmp_path: Path, name: str, text: str
) -> None:
    write_run(tmp_path, "good")
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / RUN_FILE).write_bytes(text.encode("utf-8", "surrogateescape"))
    runs, notes = load_runs([tmp_path])
    assert [run.run_id for run in runs] == ["good"]
    assert len(notes) == 1 and str(odd / RUN_FILE) in notes[0]


def test_odd_lines_of_epochs_and_stages_are_counted_and_the_rest_is_used(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "run")
    odd = ['{"epoch": ' + "9" * 400 + "}", "[" * DEEP, '{"epoch": "two"}', '{"epoch": Infinity}']
    whole = (folder / EPOCHS_FILE).read_text()
    (folder / EPOCHS_FILE).write_text(whole + "\n".join(odd) + "\n")
    runs, _ = load_runs([tmp_path])
    epochs, notes = load_epochs(runs)
    assert [line["epoch"] for line in epochs["run"]] == [0, 1]
    assert notes == [f"{folder / EPOCHS_FILE}: 4 torn lines left out"]
    (folder / STAGES_FILE).write_text('{"stage": "train", "seconds": 3}\n' + "\n".join(odd))
    records, notes = load_stages([tmp_path])
    assert len(records) == 1
    assert notes == [f"{folder / STAGES_FILE}: 4 torn lines left out"]


def test_a_pipe_in_the_place_of_a_record_is_not_opened(tmp_path: Path) -> None:
    write_run(tmp_path, "good")
    for name in (RUN_FILE, EPOCHS_FILE, STAGES_FILE, "job.log"):
        (tmp_path / "pipes").mkdir(exist_ok=True)
        os.mkfifo(tmp_path / "pipes" / name)
    page = tmp_path / "page.html"
    assert run_script("report", tmp_path, "--out", page)[0] == 0
    assert "pipes/run.json is not a file" in page.read_text()


def test_a_transfer_that_finished_without_a_start_has_no_time(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_text(LogWriter().execute(1).transfer("Finished input", 2).terminate(9).text)
    (history,) = read_histories(read_event_log(path).events)
    assert history.activations[0].transfers == ()
    assert history.outcome.startswith("exit 0")


ODD_EVENTS = {
    "month 13": b"005 (1.000.000) 2026-13-01 10:00:00 Job terminated.\n...\n",
    "a date that never was": b"005 (1.000.000) 02/30 10:00:00 Job terminated.\n...\n",
    "5,000 digits": b"005 (" + b"9" * 5000 + b".000.000) 2026-09-01 10:00:00 Job was\n...\n",
    "an endless sum": b"001 (1.000.000) 2026-09-01 10:00:00 Job executing on host: <1>\n\tX = "
    + b"1+" * DEEP + b"1\n...\n",
    "an endless event": b"008 (1.000.000) 2026-09-01 10:00:00 " + b"text\n" * 250_000 + b"...\n",
}  # fmt: skip


@pytest.mark.parametrize("name", ODD_EVENTS)
def test_an_odd_event_does_not_cost_its_neighbours(tmp_path: Path, name: str) -> None:
    writer = LogWriter().execute(1).terminate(9)
    path = tmp_path / "job.log"
    path.write_bytes(writer.text.encode() + ODD_EVENTS[name] + write_event(9, "x\n").encode())
    log = read_event_log(path)
    assert [event.kind for event in log.events if event.job.cluster == 100] == [0, 1, 5, 9]
    assert log.num_torn + log.num_unreadable >= 1
    assert all(event.fields for event in log.events[1:3])  # the bindings read them


@pytest.mark.parametrize("opening", ['{"X":', "["])
def test_deep_json_is_refused_in_a_line(
    tmp_path: Path, opening: str, capsys: pytest.CaptureFixture[str]
) -> None:
    event = '{"MyType":"AbortedEvent","EventTypeNumber":9,"Cluster":1,"Proc":0,"Subproc":0,'
    event += '"EventTime":"2026-09-01T10:00:00","X":%s}\n'
    path = tmp_path / "job.log"
    path.write_text(event % (opening * DEEP))
    assert run_script("grid_report", path)[0] == 2
    one_line(capsys, 2)
    path.write_text(event % "0" + event % (opening * DEEP) + event % "1")
    assert [event.job.cluster for event in read_event_log(path).events] == [1, 1]


@pytest.mark.parametrize("most", [3, pytest.param(20, marks=pytest.mark.soak)])
def test_a_reader_that_crashes_at_every_event_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(eventlog_parse, "MAX_CRASHES", most)  # each takes some tenths of a second
    path = tmp_path / "job.log"
    path.write_bytes(ODD_EVENTS["an endless sum"] * 2 * most)
    log = read_event_log(path)
    assert (len(log.events), log.num_unreadable) == (2 * most, 2 * most)


def fuzz(folder: Path, seed: int) -> None:
    """One round: a damaged study folder through every command that reads it."""
    chance = random.Random(seed)
    shutil.copytree(EXAMPLE, folder / "runs")
    for path in sorted((folder / "runs").rglob("*.json*")):
        if chance.random() < 0.5:
            continue
        if path.suffix == ".json":
            path.write_bytes(damage_json(json.loads(path.read_text()), chance))
        else:
            path.write_bytes(damage_lines(path.read_bytes(), chance))
    source = chance.choice(sorted(DATA.glob("*.log")))
    (folder / "runs" / "job.log").write_bytes(damage_bytes(source.read_bytes(), chance))
    table = chance.choice((KEMPNER, PUBLISHED / "osg_20_epochs.csv"))
    damaged = folder / "table.csv"
    damaged.write_bytes(damage_bytes(table.read_bytes(), chance))
    runs, log, page = folder / "runs", folder / "runs" / "job.log", folder / "page.html"
    for words in (
        ("scaling_table", runs),
        ("scaling_table", runs, "--format", "json", "--predict", "4,8"),
        ("scaling_table", damaged),
        ("grid_report", log, "--runs", runs),
        ("grid_report", log, "--format", "json"),
        ("grid_report", damaged),
        ("report", runs, "--out", page),
        ("report", damaged, log, "--out", page),
    ):
        code, _ = run_script(*words)
        assert code in (0, 2), f"seed {seed}: {words} ended with {code}"


@pytest.mark.parametrize("seed", [2, 4])
def test_damaged_folders_end_every_command_with_0_or_2(tmp_path: Path, seed: int) -> None:
    fuzz(tmp_path, seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [0, 1, 3, 5, *range(100, 400)])
def test_many_damaged_folders_end_every_command_with_0_or_2(tmp_path: Path, seed: int) -> None:
    fuzz(tmp_path, seed)


def test_a_folder_whose_name_is_no_utf8_is_shown(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"runs-\xff")
    write_run(folder, os.fsdecode(b"run-\xfe"))
    write_raw(folder / "torn", "{")
    page = tmp_path / "page.html"
    assert run_script("report", folder, "--out", page)[0] == 0
    assert "runs-?" in page.read_text()
    for form in ("md", "csv", "json"):
        assert run_script("scaling_table", folder, "--format", form)[0] == 0
