"""`pip install .` gives a trainer that runs in any folder, with the files that it reads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import tomllib
from packaging.requirements import Requirement

from tests.conftest import ROOT


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """What a command that must succeed says."""
    env = os.environ | variables
    done = subprocess.run([*command], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_installed_trainer_runs_in_another_folder(tmp_path: Path) -> None:
    clone, site, elsewhere = (tmp_path / name for name in ("clone", "site", "elsewhere"))
    built = shutil.ignore_patterns("*.so*", "__pycache__")
    for name in ("dataset", "train"):
        shutil.copytree(ROOT / name, clone / name, ignore=built)
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation")
    run(*pip, "--target", site, clone, cwd=tmp_path)
    elsewhere.mkdir()
    there = {"PYTHONPATH": str(site)}
    python = sys.executable
    assert "usage: python -m train" in run(python, "-m", "train", "--help", cwd=elsewhere, **there)
    code = (
        "import dataset.archive.labels, train.data.jpeg; print(dataset.archive.labels.__file__);"
        "print(len(dataset.archive.labels.builtin_labels()), train.data.jpeg.SOURCE.exists())"
    )
    place, found = run(python, "-c", code, cwd=elsewhere, **there).splitlines()
    assert Path(place).is_relative_to(site) and found == "50000 True"


def test_the_pinned_set_lies_within_the_ranges() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = [*project["dependencies"], *project["optional-dependencies"]["all"]]
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    wanted = {need.name: need.specifier for need in map(Requirement, ranges)}
    assert wanted.keys() == pins.keys()
    assert [name for name, pin in pins.items() if pin not in wanted[name]] == []
