"""`pip install .` gives a trainer that runs in any folder, with the files that it reads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement

from tests.conftest import ROOT
from train import __version__


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """What a command that must succeed says."""
    env = os.environ | variables
    done = subprocess.run([*command], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip has installed the packages."""
    folder = tmp_path_factory.mktemp("installed")
    clone, site = folder / "clone", folder / "site"
    built = shutil.ignore_patterns("*.so*", "__pycache__")
    for name in ("dataset", "train"):
        shutil.copytree(ROOT / name, clone / name, ignore=built)
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation")
    run(*pip, "--target", site, clone, cwd=folder)
    return site


def test_the_installed_trainer_runs_in_another_folder(site: Path, tmp_path: Path) -> None:
    there, elsewhere = {"PYTHONPATH": str(site)}, tmp_path
    python = sys.executable
    assert "usage: python -m train" in run(python, "-m", "train", "--help", cwd=elsewhere, **there)
    code = (
        "import dataset.archive.labels, train.data.jpeg; print(dataset.archive.labels.__file__);"
        "print(len(dataset.archive.labels.builtin_labels()), train.data.jpeg.SOURCE.exists())"
    )
    place, found = run(python, "-c", code, cwd=elsewhere, **there).splitlines()
    assert Path(place).is_relative_to(site) and found == "50000 True"


def test_the_installed_data_plane_is_that_of_the_docs(site: Path, tmp_path: Path) -> None:
    """What docs/pytorch.md imports, and the version that pip knows."""
    code = (
        "from importlib.metadata import version\n"
        "from train.torch_data import batches, open_images\n"
        "from train import __version__, torch_data\n"
        "print(torch_data.__file__, __version__, version('trainyard'))"
    )
    found = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(site)).split()
    assert Path(found[0]).is_relative_to(site)
    assert found[1] == found[2] == __version__


def test_a_type_checker_knows_the_types_of_the_installed_data_plane(
    site: Path, tmp_path: Path
) -> None:
    (tmp_path / "loop.py").write_text(
        "from train.torch_data import batches, open_images\n"
        "reveal_type(open_images('data').targets)\n"
        "reveal_type(batches('data', 8).epoch)\n"
        "batches('data', '8')\n"
    )
    others = ("torch", "torchvision", "numpy", "PIL")  # whose sources take long to check
    skipped = "".join(f"[mypy-{name}.*]\nfollow_imports = skip\n" for name in others)
    (tmp_path / "mypy.ini").write_text(f"[mypy]\n{skipped}")
    command = [sys.executable, "-m", "mypy", "--cache-dir", f"{tmp_path}/cache", "loop.py"]
    env = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    told = [line.partition(" ")[2] for line in done.stdout.splitlines()]
    assert told[:2] == ['note: Revealed type is "list[int]"', 'note: Revealed type is "int"'], done
    assert 'incompatible type "str"; expected "int"' in told[2], done


def test_the_citation_names_the_version() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_pinned_set_lies_within_the_ranges() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = [*project["dependencies"], *project["optional-dependencies"]["all"]]
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    wanted = {need.name: need.specifier for need in map(Requirement, ranges)}
    assert wanted.keys() == pins.keys()
    assert [name for name, pin in pins.items() if pin not in wanted[name]] == []
