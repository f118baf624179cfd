"""A command that this Python cannot run says so in one line, and what to do; never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pythons import find_pythons

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path.name for path in (ROOT / "scripts").glob("*.py"))
WITHOUT_PACKAGES = {"build_plugin.py", "doctor.py", "fetch_osdf.py"}  # need none to start
# The first that a user runs, the one that jobs run, and any other, which 3.6 cannot even parse.
OLD_PYTHON_COMMANDS = (["scripts/doctor.py"], ["-m", "train", "x"], ["scripts/report.py", "x"])
FIX = "run `make setup` once, then start the command with .venv/bin/python"


def run_bare(*command: str) -> subprocess.CompletedProcess[str]:
    """Runs this Python as a system's would be: -S leaves out all that was installed."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    whole = [sys.executable, "-S", *command]
    return subprocess.run(whole, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_without_its_packages_is_one_line(script: str, tmp_path: Path) -> None:
    arguments = ["--out", str(tmp_path / "out"), "x"] if script == "condor_study.py" else ["x"]
    done = run_bare(f"scripts/{script}", *arguments)
    assert "Traceback" not in done.stderr
    if script not in WITHOUT_PACKAGES | {"grid_report.py"}:
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert sys.executable in done.stderr and FIX in done.stderr
    assert not (tmp_path / "out").exists()


def test_event_logs_and_charts_without_their_packages_are_one_line(tmp_path: Path) -> None:
    log = ROOT / "tests/report/data/vacated.log"
    rows = ROOT / "run_results/published/osg_100_jobs_5_epochs.csv"
    for source, package in ((log, "htcondor"), (rows, "matplotlib")):
        done = run_bare("scripts/grid_report.py", str(source), "--out", str(tmp_path))
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert package in done.stderr.splitlines()[-1]


def test_the_trainer_without_its_packages_is_one_line() -> None:
    done = run_bare("-m", "train", "--dummy")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "torch, torchvision, numpy, PIL" in done.stderr and FIX in done.stderr


def test_an_old_python_is_named_with_its_version(tmp_path: Path) -> None:
    code = (
        "import sys; sys.version_info = (3, 9, 18); sys.path.insert(0, '.');"
        "from dataset.packages import require_packages; require_packages()"
    )
    commands = [[sys.executable, "-c", code]]
    for old in find_pythons(6, 7, 8, 9):  # below the oldest that we promise, where there are some
        known = OLD_PYTHON_COMMANDS[:2] if "3.6" in str(old) else OLD_PYTHON_COMMANDS
        commands += [[str(old), *words] for words in known]
    for command in commands:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, command
        assert "is Python 3." in done.stderr and "3.10 or newer is needed" in done.stderr
        assert "run `make setup" in done.stderr
