"""`make setup` with another place, another Python, and a full disk; the packages are left out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dataset.packages import PINNED_PYTHONS
from tests.conftest import ROOT


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What `make setup` needs of a clone; it installs nothing, and a stand-in is the kernel."""
    folder = tmp_path / "clone"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", folder)
    shutil.copy(ROOT / "scripts/setup.sh", folder / "scripts")
    for name in ("requirements.txt", "requirements-dev.txt"):
        (folder / name).touch()
    (folder / "train/data").mkdir(parents=True)
    (folder / "train/data/jpeg.py").write_text("print('kernel built')\n")
    (folder / "train/data/jpeg_crop.c").touch()
    return folder


def make(clone: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A finished `make`, with this Python unless another is named."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    env = env | {"PYTHON": sys.executable} | variables
    return subprocess.run(["make", *words], cwd=clone, env=env, capture_output=True, text=True)


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    """The only line that a failed set-up says, make's own at the end excepted."""
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("make: ***")]
    return line


@pytest.mark.story
def test_a_venv_elsewhere_is_linked_and_serves_a_second_clone(clone: Path, tmp_path: Path) -> None:
    venv = tmp_path / "scratch" / "trainyard"
    (clone / "requirements-dev.txt").write_text("./no-such-package\n")
    done = make(clone, "setup", f"VENV={venv}")
    assert done.returncode == 2 and not (clone / ".venv").exists()
    assert "make setup VENV=/a/larger/disk/trainyard" in done.stderr.splitlines()[-2]

    (clone / "requirements-dev.txt").write_text("")
    done = make(clone, "setup", f"VENV={venv}")  # goes on where it stopped
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["kernel built"]
    assert (clone / ".venv").readlink() == venv and not (venv / "tmp").exists()
    code = "import sys; print(sys.prefix != sys.base_prefix)"
    python = [".venv/bin/python", "-c", code]
    assert subprocess.run(python, cwd=clone, capture_output=True, text=True).stdout == "True\n"
    assert make(clone, "setup").stdout == ""  # later commands need no VENV, and it is there
    os.utime(clone / "train/data/jpeg_crop.built", (0, 0))  # an update brought another source
    assert make(clone, "setup").stdout == "kernel built\n"

    made = (venv / ".done").stat().st_mtime_ns
    second = tmp_path / "second"
    shutil.copytree(clone, second, ignore=shutil.ignore_patterns(".venv"))
    done = make(second, "setup", f"VENV={venv}")
    assert done.returncode == 0 and done.stdout == "kernel built\n"
    assert (second / ".venv").readlink() == venv
    assert (venv / ".done").stat().st_mtime_ns == made


def test_a_venv_that_would_be_hidden_by_the_one_here_is_refused(
    clone: Path, tmp_path: Path
) -> None:
    (clone / ".venv").mkdir()
    (clone / ".venv/.done").touch()
    error = error_of(make(clone, "setup", f"VENV={tmp_path}/new"))
    assert error.startswith("error: .venv is here already") and error.endswith("make clean")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("version", ["3.6", "3.10", "3.15"])
def test_a_python_without_wheels_of_the_pins_is_one_line(
    clone: Path, tmp_path: Path, version: str
) -> None:
    python = tmp_path / "python3"  # a stand-in: it is only asked for its version
    python.write_text(f"#!/bin/sh\necho {version}\n")
    python.chmod(0o755)
    error = error_of(make(clone, "setup", f"PYTHON={python}"))
    assert f"is Python {version}, and the pinned packages need one of 3.11" in error
    assert "make setup PYTHON=" in error
    assert not (clone / ".venv").exists()


def test_a_python_that_is_not_here_is_one_line(clone: Path) -> None:
    error = error_of(make(clone, "setup", "PYTHON=python3.99"))
    assert error.startswith("error: python3.99 cannot be run here; name another Python: make setup")


def test_the_doctor_and_the_set_up_know_the_same_pythons() -> None:
    (line,) = [
        line
        for line in (ROOT / "scripts/setup.sh").read_text().splitlines()
        if line.startswith("pythons=")
    ]
    versions = line.split("'")[1].split()
    assert versions == [f"{major}.{minor}" for major, minor in sorted(PINNED_PYTHONS)]
