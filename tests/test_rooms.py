"""Maps of the code and the folders agree: each __init__.py, README's tree, docs/architecture.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURE = ROOT / "docs/architecture.md"
MAX_MODULES = 23
MAX_LINES = 300
PACKAGES = sorted(
    init.parent.relative_to(ROOT).as_posix()
    for top in ("dataset", "train", "report", "scripts")
    for init in (ROOT / top).rglob("__init__.py")
)
CODE = ["dataset", "train", "report", "scripts", "slurm", "condor", "benchmarks", "tests"]
TOPS = [*CODE, "docs", "run_results"]
PATH = re.compile(rf"(?<![\w/])(?:{'|'.join(TOPS)})/(?:[\w./-]*\w)?")


def read_map(init: Path) -> list[str]:
    """The names on a map: words with two spaces behind them; those of rooms end with a slash."""
    text = ast.get_docstring(ast.parse(init.read_text()), clean=False) or ""
    return re.findall(r"^(\w+/?)  +\S", text, re.MULTILINE)


def list_room(folder: Path) -> list[str]:
    modules = [path.stem for path in folder.glob("*.py") if path.name != "__init__.py"]
    return sorted([*modules, *(f"{init.parent.name}/" for init in folder.glob("*/__init__.py"))])


def read_tree(page: str) -> dict[str, str]:
    """The folders of README's tree, without their last slash, and the words beside each."""
    folders: dict[str, str] = {}
    top = name = ""
    for line in page.partition("\n## The tree\n")[2].partition("\n## ")[0].splitlines():
        if found := re.match(r"    (  )?(\w+)/  +(\S.*)", line):
            top = top if found[1] else found[2]
            name = f"{top}/{found[2]}" if found[1] else top
            assert name not in folders, f"{name} is listed twice"
            folders[name] = found[3]
        elif line.startswith(" " * 8):
            folders[name] += " " + line.strip()
    return folders


def test_there_are_rooms() -> None:
    assert {"dataset/federation", "train/ranks", "report/grid", "scripts/checks"} <= set(PACKAGES)


@pytest.mark.parametrize("room", PACKAGES)
def test_a_map_has_every_file_of_its_room_once(room: str) -> None:
    assert sorted(read_map(ROOT / room / "__init__.py")) == list_room(ROOT / room)


@pytest.mark.parametrize("room", [*PACKAGES, "scripts"])
def test_a_room_is_small_enough_to_read_its_names(room: str) -> None:
    assert len(list((ROOT / room).glob("*.py"))) - 1 <= MAX_MODULES


def test_no_file_of_the_product_is_long() -> None:
    folders = ("dataset", "train", "report", "scripts", "slurm", "condor", "benchmarks")
    kinds = {".py", ".sh", ".sbatch", ".sub"}
    files = [path for top in folders for path in (ROOT / top).rglob("*") if path.suffix in kinds]
    assert len(files) > 200
    long = {str(path): n for path in files if (n := len(path.read_text().splitlines())) > MAX_LINES}
    assert long == {}


@pytest.mark.parametrize("room", PACKAGES)
def test_tests_mirror_the_rooms(room: str) -> None:
    """A room has its folder of tests, unless it is tested by its script alone."""
    own = {"scripts/jobs", "scripts/study"}  # tests/scripts/test_scaling_study.py
    assert room in own or (ROOT / "tests" / room).is_dir()


def test_the_readme_lists_every_room_and_nothing_else() -> None:
    assert sorted(read_tree((ROOT / "README.md").read_text())) == sorted({*PACKAGES, *TOPS})


def test_the_readme_lists_folders_that_exist() -> None:
    folders = read_tree((ROOT / "README.md").read_text())
    assert [name for name in folders if not (ROOT / name).is_dir()] == []


def test_the_readme_names_every_page_of_docs() -> None:
    named = read_tree((ROOT / "README.md").read_text())["docs"].split(", ")
    assert sorted(named) == sorted(page.stem for page in (ROOT / "docs").glob("*.md"))


def test_every_path_on_the_page_of_the_architecture_exists() -> None:
    named = set(PATH.findall(ARCHITECTURE.read_text()))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    assert set(PACKAGES) <= {name.rstrip("/") for name in named}


def test_every_name_on_the_page_of_the_architecture_is_defined_in_a_file_of_it() -> None:
    page = ARCHITECTURE.read_text()
    files = [ROOT / name for name in set(PATH.findall(page)) if name.endswith(".py")]
    defined = {name for file in files for name in names_of(file)}
    assert [name for name in re.findall(r"`([A-Za-z_]+)`", page) if name not in defined] == []


def names_of(file: Path) -> set[str]:
    """What a module defines: functions, methods, classes and constants."""
    nodes = list(ast.walk(ast.parse(file.read_text(), str(file))))
    kinds = (ast.FunctionDef, ast.ClassDef)
    names = [node for node in nodes if isinstance(node, ast.Name)]
    constants = {name.id for name in names if isinstance(name.ctx, ast.Store) and name.id.isupper()}
    return constants | {node.name for node in nodes if isinstance(node, kinds)}


def test_a_tree_is_read_as_it_is_written() -> None:
    """The reader of the tree can fail: a room belongs to the folder above it, prose is no room."""
    lines = [
        "",
        "## The tree",
        "",
        "    a/      one,",
        "            more",
        "      in/   inside",
        "    b/      two",
        "",
        "The data of c/  goes on.",
        "",
        "## Next",
        "    d/      not this",
    ]
    assert read_tree("\n".join(lines)) == {"a": "one, more", "a/in": "inside", "b": "two"}
    assert PATH.findall("`train/run.py`, in dataset/fake. On data/x") == [
        "train/run.py",
        "dataset/fake",
    ]


def test_a_map_is_read_as_it_is_written(tmp_path: Path) -> None:
    """The reader of maps can fail: prose and a second word are no names."""
    init = tmp_path / "__init__.py"
    lines = [
        "A room: of two.",
        "",
        "one    the first",
        "other  not this",
        "",
        "in/    x",
    ]
    init.write_text('"""' + "\n".join(lines) + '\n"""\n')
    assert read_map(init) == ["one", "other", "in/"]
    (tmp_path / "one.py").touch()
    assert list_room(tmp_path) == ["one"]


def test_what_pip_installs_has_every_room_of_the_two_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    installed = project["tool"]["setuptools"]["packages"]
    rooms = [room.replace("/", ".") for room in PACKAGES]
    assert sorted(installed) == [room for room in rooms if room.startswith(("dataset", "train"))]
