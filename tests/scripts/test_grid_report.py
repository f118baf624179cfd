"""The command: tables and event logs in, Markdown, CSV, JSON and pictures out."""

from __future__ import annotations

import csv
import io
import json
import subprocess
from functools import partial
from pathlib import Path

from tests.report.eventlogs import LogWriter
from tests.scripts.commands import fork_script, run_script

ROOT = Path(__file__).resolve().parents[2]
STUDY = ROOT / "run_results/published/osg_100_jobs_5_epochs.csv"


run = partial(fork_script, "grid_report")
run_for_real = partial(run_script, "grid_report")


def write_job(path: Path, job: str = "12.003.000") -> Path:
    writer = LogWriter(job).transfer("Started input", 10).transfer("Finished input", 30)
    path.write_text(writer.execute(30).terminate(100).text)
    return path


def test_the_published_study_in_one_command(tmp_path: Path) -> None:
    """The report in the repository is the one that the command writes."""
    result = run_for_real(STUDY, "--out", tmp_path / "report", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    stored = ROOT / "run_results/published/osg_100_jobs_report"
    names = {path.name for path in stored.iterdir()}
    assert {path.name for path in (tmp_path / "report").iterdir()} == names
    assert (stored / "report.md").read_text() == result.stdout
    for path in stored.iterdir():
        if path.suffix in (".md", ".csv", ".json"):
            assert path.read_text() == (tmp_path / "report" / path.name).read_text(), path.name


def test_json_and_csv_carry_seconds(tmp_path: Path) -> None:
    log = write_job(tmp_path / "job.log")
    (row,) = csv.DictReader(io.StringIO(run(log, "--format", "csv").stdout))
    assert (row["job_id"], float(row["compute_s"]), float(row["transfer_last_s"])) == (
        "12.003.000", 70, 20,
    )  # fmt: skip
    tables = {
        table["name"]: table["rows"] for table in json.loads(run(log, "--format", "json").stdout)
    }
    assert tables["outcomes"] == [{"outcome": "exit 0, output unchecked", "jobs": 1}]


def test_a_folder_of_logs_checked_by_what_came_back(tmp_path: Path) -> None:
    write_job(tmp_path / "a.log", "12.000.000")
    write_job(tmp_path / "b.log", "12.001.000")
    for proc, status in ((0, "done"), (1, "failed")):
        folder = tmp_path / "runs" / f"12.{proc}"
        folder.mkdir(parents=True)
        record = {"schema": 1, "status": status, "exit_code": 0, "images_trained": 9}
        record["scheduler"] = {"kind": "condor", "job_id": f"12.{proc}"}
        (folder / "run.json").write_text(json.dumps(record))
    result = run(tmp_path, "--runs", tmp_path / "runs", "--format", "csv")
    assert result.returncode == 0, result.stderr
    outcomes = {row["job_id"]: row["outcome"] for row in csv.DictReader(io.StringIO(result.stdout))}
    assert outcomes == {"12.000.000": "success", "12.001.000": "wrong output"}


def expect_one_line(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


def test_a_users_mistake_is_one_line(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("no log\n")
    expect_one_line(run(notes), "no HTCondor event in", "notes.txt")
    expect_one_line(run(tmp_path / "missing.log"), "missing.log", "check the path")
    expect_one_line(run(tmp_path), "no *.log file below")
    log = write_job(tmp_path / "job.log")
    expect_one_line(run(log, STUDY), "tables or event logs, not both")
    expect_one_line(run(STUDY, "--runs", tmp_path), "--runs goes with event logs")
    empty = tmp_path / "empty.log"
    empty.write_text("")
    expect_one_line(run(empty), "no job in", "did it start yet?")
