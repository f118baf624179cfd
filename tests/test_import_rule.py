"""Who may import whom: read from the code itself, and tried where torch cannot be imported."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOPS = ("dataset", "train", "report", "scripts")
# Who may import whom, inner rooms first. A name stands for a module or for all of a room, and
# "dataset:" for the files that lie directly in that folder.
BASE = "dataset:"
# Of the archives, train/data uses the index of a tar, how to read by it, and what is in a folder.
INDEX_AND_NAMES = (
    "dataset.archive.class_folders",  # which are the classes, and their images
    "dataset.archive.header_check",  # is it the image that the index says?
    "dataset.archive.index",
    "dataset.archive.index_file",
    "dataset.archive.output_folder",  # is an extraction into a folder unfinished?
    "dataset.archive.tar_header",  # how long a header is
    "dataset.archive.units",
)
CLASS_NAMES = "dataset.archive.labels"  # of the real set, for classes.json
MAY_IMPORT = {
    "dataset.federation": (BASE, "dataset.federation"),
    "dataset.transfer": (BASE, "dataset.federation", "dataset.transfer"),
    "dataset.fetch": (BASE, "dataset.federation", "dataset.transfer", "dataset.fetch"),
    "dataset.archive": (BASE, "dataset.archive"),
    "dataset.fake": (BASE, "dataset.fake"),
    "dataset.stream": (
        BASE,
        "dataset.federation",
        "dataset.transfer",
        "dataset.fetch",
        "dataset.archive",
        "dataset.stream",
    ),
    "dataset": (BASE,),
    "train.ranks": (BASE, "train.ranks"),
    "train.data": (
        BASE,
        *INDEX_AND_NAMES,
        "dataset.stream.arrivals",
        "dataset.stream.spec",
        "dataset.stream.unit_map",
        "dataset.stream.unit_plan",
        "train.ranks",
        "train.data",
    ),
    "train": (
        BASE,
        "dataset.federation",
        CLASS_NAMES,
        "dataset.fetch",
        "dataset.stream",
        "train",
    ),
    "report.grid": (
        "report.grid",
        "report.table",
        "report.words",
        "report.published_table",
        "report.record_shape",
        "report.streams",
        "train.records.record",
        "dataset.errors",
    ),
    "report": ("report", "train.records.record", "dataset.errors"),
    "scripts": ("scripts", "report", "train", "dataset"),
    "benchmarks": ("benchmarks", "scripts", "report", "train", "dataset"),
}
# train reaches fetch through one module, the fetcher of a stream too, and archive through these.
STREAM = ("train.stream.run_stream", "train.stream.early", "train.stream.loop_stream")
ONLY_DOORS = {
    "dataset.fetch": {"train.open_data"},
    "dataset.archive": {
        "train.data.bounded_cache",
        "train.data.unit_needs",
        "train.data.unit_source",
        "train.data.sources",
        "train.data.splits",
        "train.data.stream_source",
        "train.data.tar_layout",
        "train.records.classes",
    },
    "dataset.stream.arrivals": {
        "train.data.needs",
        "train.data.stream_source",
        "train.stream.nodes",
        *STREAM,
    },
    "dataset.stream.spec": {
        "train.data.bounded_cache",
        "train.data.needs",
        "train.data.unit_needs",
        "train.stream.task",
        *STREAM,
    },
    "dataset.stream.unit_map": {"train.data.bounded_cache", "train.data.unit_source"},
    "dataset.stream.unit_plan": {"train.data.bounded_cache", "train.data.unit_needs"},
    "dataset.stream.plan": {*STREAM, "train.stream.task", "train.stream.nodes", "train.open_data"},
    "dataset.stream.node": {*STREAM, "train.stream.task", "train.stream.nodes"},
    "dataset.stream.meeting": {"train.stream.loop_stream", "train.open_data"},
    "dataset.stream.keeper": set(),
    "dataset.stream.fetcher": set(),
}
# What a room needs beyond the standard library when its modules are imported.
NEEDS = {
    "dataset": {"numpy"},
    "train": {"torch", "torchvision", "numpy", "PIL"},
}
OPTIONAL = {  # inside try/except ImportError, or inside a function: their absence is borne
    "dataset": {"certifi", "crc32c", "google_crc32c", "pelicanfs", "tqdm"},
    "train": {"pynvml"},
}
EXTRA = {"dataset/fake/picture.py": {"PIL"}}  # pictures are drawn for tests and demos only
WITHOUT_TORCH = [
    "train.records.record",
    "train.ranks.launch",
    "train.records.stage_meter",
    "train.ranks.launch_variables",
    "train.ranks.batch_system",
    "train.ranks.cpu_isa",
    "train.ranks.cpus",
    "train.records.phases",
    "train.run_folder",
    "train.data.splits",
    "train.data.needs",
    "train.data.readers",
    "train.data.sample_order",
    "train.data.tar_layout",
    "train.paths",
]


def files_of(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


@functools.cache
def imports_of(path: Path) -> tuple[tuple[str, bool], ...]:
    """(name with its dots, whether it is bound when the module itself is imported)."""
    return tuple(_find_imports(path))


def _find_imports(path: Path) -> Iterator[tuple[str, bool]]:
    tree = ast.parse(path.read_text(), str(path))
    late = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Try))
        and (not isinstance(node, ast.Try) or guards_imports(node))
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) not in late
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", id(node) not in late


def guards_imports(node: ast.Try) -> bool:
    names = {
        name.id
        for handler in node.handlers
        for name in ast.walk(handler.type or node)
        if isinstance(name, ast.Name)
    }
    return bool(names & {"ImportError", "ModuleNotFoundError"})


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def is_below(name: str, allowed: str) -> bool:
    if allowed.endswith(":"):
        folder = allowed[:-1]
        top, _, rest = name.partition(".")
        return top == folder and (ROOT / folder / f"{rest.partition('.')[0]}.py").exists()
    return name == allowed or name.startswith(allowed + ".")


def room_of(module: str) -> str:
    return next(room for room in MAY_IMPORT if is_below(module, room))


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_the_rooms_it_may(room: str) -> None:
    files = [path for path in files_of(room.split(".")[0]) if room_of(module_of(path)) == room]
    assert files
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name, _ in imports_of(path)
        if name.split(".")[0] in (*TOPS, "tests", "benchmarks")
        and not any(is_below(name, allowed) for allowed in MAY_IMPORT[room])
    ]
    assert wrong == []


@pytest.mark.parametrize("room", sorted(ONLY_DOORS))
def test_the_trainer_enters_a_room_of_the_data_through_its_doors_alone(room: str) -> None:
    entering = {
        module_of(path)
        for path in files_of("train")
        for name, _ in imports_of(path)
        if is_below(name, room)
    }
    assert entering == ONLY_DOORS[room]


def test_the_trainer_uses_all_that_it_may_of_the_archives() -> None:
    """What it no longer uses is taken off the list."""
    known = {module_of(path): path for path in files_of("dataset")}
    names = {name for path in files_of("train") for name, _ in imports_of(path)}
    used = {owner(name, known) for name in names if is_below(name, "dataset.archive")}
    assert used == {*INDEX_AND_NAMES, CLASS_NAMES}


def test_no_module_imports_itself_through_others() -> None:
    """No cycle of modules, whether an import stands at the top or in a function."""
    known = {module_of(path): path for top in TOPS for path in files_of(top)}
    edges = {
        module: {n for full, _ in imports_of(path) if (n := owner(full, known)) and n != module}
        for module, path in known.items()
    }
    while edges:
        leaves = {module for module, others in edges.items() if not others & edges.keys()}
        assert leaves, f"a cycle among {sorted(edges)}"
        edges = {module: others for module, others in edges.items() if module not in leaves}


def owner(name: str, known: Mapping[str, Path]) -> str | None:
    """The module that an imported name is, or is of."""
    return next((part for part in (name, name.rpartition(".")[0]) if part in known), None)


@pytest.mark.parametrize("room", sorted(NEEDS))
def test_a_room_needs_only_its_few_packages(room: str) -> None:
    known = set(sys.stdlib_module_names) | set(TOPS)
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files_of(room)
        for name, at_import in imports_of(path)
        for package in [name.split(".")[0]]
        if package not in known
        and package not in NEEDS[room] | EXTRA.get(path.relative_to(ROOT).as_posix(), set())
        and (at_import or package not in OPTIONAL[room])
    ]
    assert wrong == []


def test_the_rule_is_read_from_nested_and_guarded_imports(tmp_path: Path) -> None:
    """The reader of imports can fail: it sees those in functions, and tells guarded ones apart."""
    module = tmp_path / "module.py"
    module.write_text(
        "import torch.nn\n"
        "from train import run as story\n"
        "try:\n    import pynvml\nexcept ImportError:\n    pynvml = None\n"
        "try:\n    import numpy\nexcept ValueError:\n    pass\n"
        "def f():\n    from report.scaling import table\n"
    )
    assert dict(imports_of(module)) == {
        "torch.nn": True,
        "train.run": True,
        "pynvml": False,
        "numpy": True,
        "report.scaling.table": False,
    }


def test_what_promises_to_live_without_torch_is_imported_without_it() -> None:
    """In one process in which torch, torchvision and every optional package cannot be imported."""
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for room in ("dataset", "report")
        for path in files_of(room)
        if path.name not in ("__init__.py", "__main__.py")
    ]
    names += [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in files_of("train")
        if path.name != "__init__.py" and "(no torch)" in path.read_text().split('"""')[1]
    ]
    blocked = ["torch", "torchvision", "pynvml", "pelicanfs", "htcondor2", "classad2"]
    code = (
        "import sys, importlib\n"
        f"for name in {blocked}: sys.modules[name] = None\n"
        f"for name in {names + WITHOUT_TORCH}: importlib.import_module(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr


def test_no_test_module_imports_another(tmp_path: Path) -> None:
    """What two of them use lies in a helper module beside them; benchmarks borrow from none."""
    assert [*imports_of_tests(files_of("tests")), *imports_of_tests(files_of("benchmarks"))] == []
    (tmp_path / "x.py").write_text("from tests.report.test_page import make_page\n")
    (tmp_path / "y.py").write_text("from tests.report import test_page\n")
    (tmp_path / "z.py").write_text("from tests.report.records import write_run\n")
    assert len([*imports_of_tests(sorted(tmp_path.glob("*.py")))]) == 2


def imports_of_tests(paths: list[Path]) -> Iterator[str]:
    """FILE: MODULE wherever a file imports a test module, or something out of one."""
    for path in paths:
        for name in {name for name, _ in imports_of(path)}:
            parts = name.split(".")
            if parts[0] == "tests" and any(part.startswith("test_") for part in parts):
                yield f"{path}: {name}"
