"""scripts/scaling_table.py as a person runs it."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.report.records import KEMPNER, ROOT, write_raw, write_run
from tests.scripts.commands import fork_script, run_script

run = partial(fork_script, "scaling_table")
run_for_real = partial(run_script, "scaling_table")


def test_markdown_has_the_published_columns_first() -> None:
    done = run_for_real(KEMPNER)
    assert done.returncode == 0, done.stderr
    heading = next(line for line in done.stdout.splitlines() if line.startswith("| GPU"))
    names = [name.strip() for name in heading.strip("|").split("|")]
    assert names[:10] == [
        "GPU",
        "Batch Size",
        "#N",
        "#GPUs",
        "LR",
        "WCT (s)",
        "WCT (h:m:s)",
        "Val Acc@1",
        "Val Acc@5",
        "Scaling Efficiency",
    ]
    for efficiency in ("100.00%", "98.62%", "97.61%", "94.78%", "90.93%", "85.05%", "76.76%"):
        assert efficiency in done.stdout


def test_own_csv_can_be_read_again(tmp_path: Path) -> None:
    for num_gpus in (1, 2, 4):
        write_run(tmp_path / "runs", f"run{num_gpus}", num_gpus)
    first = run(tmp_path / "runs", "--format", "csv")
    assert first.returncode == 0, first.stderr
    (tmp_path / "table.csv").write_text(first.stdout)
    second = run(tmp_path / "table.csv", "--format", "csv")
    keys = ("num_gpus", "wall_clock_s", "scaling_efficiency_pct")
    tables = [list(csv.DictReader(io.StringIO(text))) for text in (first.stdout, second.stdout)]
    assert [[row[k] for k in keys] for row in tables[0]] == [
        [row[k] for k in keys] for row in tables[1]
    ]


def test_json_has_the_phases_too(tmp_path: Path) -> None:
    write_run(tmp_path, "run1", 1)
    write_run(tmp_path, "run2", 2)
    tables = json.loads(run(tmp_path, "--format", "json").stdout)
    assert [table["name"] for table in tables] == ["scaling", "phases"]
    assert tables[1]["rows"][0]["startup"] == 10


def test_mistakes_are_one_line_and_exit_2(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "README.md").write_text("hello")
    (tmp_path / "wrong.csv").write_text("a,b\n1,2\n")
    (tmp_path / "zero.csv").write_text(KEMPNER.read_text().replace(",1,1,0.1", ",1,0,0.1"))
    for path, code, words in (
        (tmp_path / "empty", 2, "no runs found"),
        (tmp_path / "README.md", 2, "README.md is neither a run folder nor a published CSV; give"),
        (tmp_path / "nowhere", 2, "no such file"),
        (tmp_path / "nowhere.csv", 2, "No such file"),
        (tmp_path / "wrong.csv", 2, "lacks the column gpu"),
        (tmp_path / "zero.csv", 2, "num_gpus is 0"),
    ):
        done = run(path)
        assert done.returncode == code, done.stderr
        assert words in done.stderr
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("epochs", ["0", "-3"])
@pytest.mark.parametrize("script", ["scaling_table", "report"])
def test_less_than_one_epoch_is_refused(tmp_path: Path, script: str, epochs: str) -> None:
    done = fork_script(script, KEMPNER, "--epochs", epochs, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, f"error: --epochs {epochs}: must be at least 1\n")


def test_a_run_json_stands_for_its_folder(tmp_path: Path) -> None:
    write_run(tmp_path, "run1", 1)
    done = run(next(tmp_path.rglob("run.json")))
    assert done.returncode == 0, done.stderr


def test_a_newer_schema_is_a_note_beside_the_rest(tmp_path: Path) -> None:
    write_run(tmp_path, "good")
    write_raw(tmp_path / "new", {"schema": 2, "run_id": "new"})
    done = run(tmp_path)
    assert done.returncode == 0
    assert "note: left out:" in done.stderr and "schema 2" in done.stderr
    only_new = run(tmp_path / "new")
    assert only_new.returncode == 2
    assert "schema 2" in only_new.stderr


def test_no_torch_is_imported() -> None:
    code = (
        "import sys, runpy; sys.argv = ['x', sys.argv[1]]\n"
        "try: runpy.run_path('scripts/scaling_table.py', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code, str(KEMPNER)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=280)
