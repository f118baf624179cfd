"""scripts/report.py as a person runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.report.example_log_lines import print_run
from tests.report.records import KEMPNER, PUBLISHED, REPLAY, ROOT, write_raw, write_run
from tests.scripts.commands import fork_script, run_script

EVENT_LOG = """000 (012.000.000) 2026-01-01 10:00:00 Job submitted from host: <127.0.0.1:1>
...
001 (012.000.000) 2026-01-01 10:00:10 Job executing on host: <127.0.0.1:2>
...
005 (012.000.000) 2026-01-01 10:10:10 Job terminated.
\t(1) Normal termination (return value 0)
...
"""


def run(cwd: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return fork_script("report", *words, cwd=cwd)


def run_for_real(cwd: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return run_script("report", *words, cwd=cwd)


def test_one_run_makes_a_page(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "only")
    done = run_for_real(tmp_path, "runs", "--out", "pages/one.html", "--title", "One run")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "pages" / "one.html").read_text()
    assert "<h1>One run</h1>" in text
    assert "only one size was measured" in text
    assert [path.name for path in (tmp_path / "pages").iterdir()] == ["one.html"]


def test_published_tables_make_a_page_with_the_prediction_and_the_grid(tmp_path: Path) -> None:
    done = run(tmp_path, KEMPNER, PUBLISHED / "osg_20_epochs.csv", "--epochs", "90")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "report.html").read_text()
    assert "23 % of the 64-GPU epoch is a fixed cost of 6.9 s" in text
    assert 'id="grid"' in text


def test_logs_of_pytorch_examples_make_a_page_with_curves(tmp_path: Path) -> None:
    (tmp_path / "old.log").write_text("\n".join(print_run()))
    row = "V100,256,1,8,0.1,old.log"
    (tmp_path / "logs.csv").write_text(f"gpu,batch_size,num_nodes,num_gpus,lr,log\n{row}\n")
    done = run(tmp_path, "logs.csv")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "report.html").read_text()
    assert all(f'id="{part}"' in text for part in ("scaling", "time", "learning"))
    assert "start-up and checkpoints are not in it" in text
    bare = run(tmp_path, "old.log")
    assert bare.returncode == 2 and bare.stderr.count("\n") == 1
    assert "name it in a CSV with the columns gpu,batch_size,num_nodes,num_gpus,log" in bare.stderr


def test_a_replay_alone_makes_a_page(tmp_path: Path) -> None:
    done = run(tmp_path, REPLAY)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "report.html").read_text()
    assert 'data-name="replay"' in text and 'data-name="replay_jobs"' in text


def test_a_folder_may_hold_runs_and_event_logs(tmp_path: Path) -> None:
    write_run(tmp_path / "all", "only")
    (tmp_path / "all" / "study.log").write_text(EVENT_LOG)
    (tmp_path / "all" / "other.log").write_text("05:00:01 epoch 0 ...\n")
    done = run(tmp_path, "all")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "report.html").read_text()
    assert 'id="grid"' in text and 'id="scaling"' in text


def test_sizes_to_predict_are_given_with_commas_before_or_after_the_inputs(tmp_path: Path) -> None:
    for words in ((KEMPNER, "--predict", "128,256"), ("--predict", "128,256", KEMPNER)):
        done = run(tmp_path, *words, "--epochs", "90")
        assert done.returncode == 0, done.stderr
        text = (tmp_path / "report.html").read_text()
        assert all(f'data-value="{size}">{size}</td>' in text for size in (128, 256))


def test_a_log_without_an_event_is_a_note_on_the_page(tmp_path: Path) -> None:
    write_run(tmp_path / "all", "only")
    (tmp_path / "all" / "study.log").write_text(EVENT_LOG[:40])  # the first event is torn
    done = run(tmp_path, "all")
    assert done.returncode == 0, done.stderr
    assert "no grid report: no HTCondor event in" in (tmp_path / "report.html").read_text()


def test_what_cannot_be_read_is_a_note_on_the_page(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "good")
    write_raw(tmp_path / "runs" / "newer", {"schema": 7, "run_id": "newer"})
    with open(tmp_path / "runs" / "good" / "epochs.jsonl", "a") as file:
        file.write('{"epoch": 2')
    done = run(tmp_path, "runs")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "report.html").read_text()
    assert "has schema 7" in text
    assert "1 torn line left out" in text


def test_mistakes_are_one_line_and_leave_no_page(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("hello")
    write_raw(tmp_path / "zero" / "run", {"schema": 1, "world_size": 0})
    for name, words in (
        ("empty", "no runs, stages or grid jobs"),
        ("nowhere", "no such file or folder"),
        ("text.txt", "is not a run.json"),
        ("zero", "world_size is 0"),
    ):
        done = run(tmp_path, name)
        assert done.returncode == 2, done.stderr
        assert words in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "report.html").exists()


def test_a_folder_as_out_is_told_what_to_name_instead(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    done = run(tmp_path, KEMPNER, "--out", "x")
    message = "error: --out x is a folder; name a file, such as x/report.html\n"
    assert (done.returncode, done.stderr) == (2, message)


def test_no_torch_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys, runpy; script = sys.argv[1]; sys.argv = ['x', sys.argv[2]]\n"
        "try: runpy.run_path(script, run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end\n"
        "assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code, str(ROOT / "scripts" / "report.py"), str(KEMPNER)]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=280)
