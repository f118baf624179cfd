"""The engine as a transfer plugin: Python 3.9's standard library alone."""

from __future__ import annotations

import ast
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dataset.small_server import serving
from tests.pythons import find_pythons

ROOT = Path(__file__).resolve().parents[2]
LIST_MODULES = """
import sys
sys.path.insert(0, sys.argv[1])
import dataset.fetch.urls, dataset.fetch.inspect
for name in sorted(sys.modules):
    module = sys.modules[name]
    if name.partition(".")[0] == "dataset":
        print(module.__file__)
    elif name.partition(".")[0] not in sys.stdlib_module_names and name != "__main__":
        raise SystemExit(f"{name} is not of the standard library")
"""

FETCH = """
import importlib, sys
from pathlib import Path
md5, root, *files, url, out = sys.argv[1:]
sys.path.insert(0, root)
for file in files:
    importlib.import_module(".".join(Path(file).relative_to(root).with_suffix("").parts))
from dataset.fetch.urls import fetch_urls
from dataset.fetch.request import Request
(summary,) = fetch_urls([url], Request(Path(out), given={"md5": md5}, environ={"HOME": out}))
print(summary.verified)
"""


def plugin_files() -> list[Path]:
    """Every file of ours that a fetch imports, found by importing it without site-packages."""
    command = [sys.executable, "-I", "-S", "-c", LIST_MODULES, str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    return [Path(line) for line in done.stdout.splitlines()]


def test_the_engine_imports_nothing_but_the_standard_library() -> None:
    names = {path.name for path in plugin_files()}
    assert {"store.py", "lookup.py", "errors.py"} <= names


def _annotations(tree: ast.Module) -> list[ast.expr]:
    """What stands behind the colons and arrows of a file."""
    nodes = list(ast.walk(tree))
    hints = [node.annotation for node in nodes if isinstance(node, ast.arg | ast.AnnAssign)]
    hints += [node.returns for node in nodes if isinstance(node, ast.FunctionDef)]
    return [hint for hint in hints if hint is not None]


@pytest.mark.parametrize("path", plugin_files(), ids=lambda path: path.name)
def test_a_file_of_the_engine_keeps_to_the_grammar_of_python_3_9(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 9))  # refuses match statements
    names = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    if path.name == "packages.py":  # speaks on Python 3.6, which has no such import
        assert not any(isinstance(node, ast.BinOp) for node in _annotations(tree)), "X | Y is 3.10"
    elif path.name != "__init__.py":
        assert any(node.module == "__future__" for node in names), "annotations must stay text"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            keywords = {keyword.arg for keyword in node.keywords}
            called = node.func.id if isinstance(node.func, ast.Name) else ""
            assert not (called == "dataclass" and keywords & {"slots", "kw_only"})
            assert not (called == "zip" and "strict" in keywords)


def test_the_engine_runs_on_python_3_9_where_there_is_one(tmp_path: Path) -> None:
    """Every file of it is imported, and an object is fetched over HTTP and verified.

    Debian 12 has no Python 3.9: there the oldest Python of the machine does it.
    """
    python = next(iter(find_pythons(9, 10, 11)), Path(sys.executable))
    content = os.urandom(3_000_000)
    with serving(content) as (url, _):
        words = [hashlib.md5(content).hexdigest(), str(ROOT), *map(str, plugin_files()), url]
        command = [str(python), "-I", "-S", "-c", FETCH, *words, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['md5 (given)']\n"
    assert (tmp_path / "object.bin").read_bytes() == content
