"""condor/trainyard.def and condor/Dockerfile say the same, and what they name is in the project."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOME = "/opt/trainyard"
# A recipe in plain words: its base image, (source, target) of each copy, its commands, variables.
Recipe = tuple[str, dict[str, str], list[str], dict[str, str]]


def read_def() -> Recipe:
    text = (ROOT / "condor/trainyard.def").read_text()
    head, *rest = re.split(r"(?m)^%", text)
    parts = {part.partition("\n")[0]: part.partition("\n")[2] for part in rest}
    lines = {name: [*_lines(part)] for name, part in parts.items()}
    copies = dict(line.split() for line in lines["files"])
    commands = [line for line in lines["post"] if not line.startswith(("set ", "cd "))]
    exports = (line.removeprefix("export ").partition("=") for line in lines["environment"])
    return _find(r"^From: (.*)$", head), copies, commands, {k: v for k, _, v in exports}


def read_dockerfile() -> Recipe:
    text = (ROOT / "condor/Dockerfile").read_text().replace("\\\n", " ")
    assert _find("^WORKDIR (.*)$", text) == HOME
    copies, commands = {}, []
    variables: dict[str, str] = {}
    for line in _lines(text):
        verb, _, words = line.partition(" ")
        if verb == "COPY":
            source, target = words.split()
            name = target.removeprefix("./") or source
            copies[source] = f"{HOME}/{name}"
        elif verb == "RUN":
            commands += [" ".join(command.split()) for command in words.split("&&")]
        elif verb == "ENV":
            name, _, variables[name] = words.partition("=")
    return _find("^FROM (.*)$", text), copies, commands, variables


def _lines(text: str) -> list[str]:
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def _find(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    assert found, pattern
    return found[1]


RECIPES = {"trainyard.def": read_def, "Dockerfile": read_dockerfile}


def test_both_recipes_make_the_same_image() -> None:
    (base, copies, commands, variables), docker = read_def(), read_dockerfile()
    assert (base, copies) == docker[:2]
    assert sorted(commands) == sorted(docker[2])
    assert variables["TRAINYARD_IMAGE"] == docker[3]["TRAINYARD_IMAGE"] == HOME


@pytest.mark.parametrize("name", RECIPES)
def test_every_copied_path_is_in_the_project_and_keeps_its_name(name: str) -> None:
    _, copies, _, _ = RECIPES[name]()
    for source, target in copies.items():
        assert (ROOT / source).exists(), source
        assert target == f"{HOME}/{source}"


@pytest.mark.parametrize("name", RECIPES)
def test_the_pinned_packages_are_installed_from_the_projects_file(name: str) -> None:
    _, copies, commands, _ = RECIPES[name]()
    (pip,) = [shlex.split(command) for command in commands if command.startswith("pip ")]
    assert pip[-2:] == ["-r", "requirements.txt"]
    assert copies["requirements.txt"] == f"{HOME}/requirements.txt"


@pytest.mark.parametrize("name", RECIPES)
def test_the_python_of_the_base_image_fits_and_is_the_one_of_readme(name: str) -> None:
    base, *_ = RECIPES[name]()
    version = _find(r"^python:(3\.\d+)-slim-bookworm$", base)
    least = _find(r'^requires-python = ">=(.*)"$', (ROOT / "pyproject.toml").read_text())
    assert [*map(int, version.split("."))] >= [*map(int, least.split("."))]
    assert f"Python {version}" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", RECIPES)
def test_the_kernel_is_built_and_loaded_with_what_its_hint_names(name: str) -> None:
    from train.data.jpeg import HINT

    _, _, commands, _ = RECIPES[name]()
    packages = _find(r"Debian: ([^)]*)\)", HINT).split()
    (apt,) = [command for command in commands if "apt-get install" in command]
    assert apt.split()[-len(packages) :] == packages
    build = commands.index("python -m train.data.jpeg")
    (proof,) = [shlex.split(c) for c in commands if c.startswith("python -c")]
    ast.parse(proof[2])
    assert "load_kernel" in proof[2]
    assert commands.index(apt) < build < len(commands) - 1


@pytest.mark.parametrize("package", ["train", "dataset", "report", "scripts"])
def test_all_that_the_copied_code_imports_of_the_project_is_copied(package: str) -> None:
    _, copies, _, _ = read_def()
    ours = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"benchmarks"}
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                top = node.module.partition(".")[0]
                beside = (path.parent / top).exists() or (path.parent / f"{top}.py").exists()
                assert top not in ours or top in copies or beside, f"{path}: {node.module}"
