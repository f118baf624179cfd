"""Ctrl-C in a command is one line and exit 130, while it is imported and in its processes too."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from dataset.errors import INTERRUPTED
from tests.conftest import ROOT

SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))


def interrupt(
    command: list[str], cwd: Path, is_time: Callable[[psutil.Popen], object], **env: str
) -> str:
    """What a command says to a Ctrl-C of its terminal, which reaches all its processes."""
    process = psutil.Popen(
        [sys.executable, *command],
        cwd=cwd,
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        while not is_time(process):
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        text: str = process.communicate(timeout=280)[0]
    finally:
        if process.is_running():
            process.kill()
    assert process.returncode == INTERRUPTED, text
    return text


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_ready_for_ctrl_c_before_it_imports_anything_large(script: Path) -> None:
    """require_packages() is the first thing that comes from outside the standard library."""
    body = ast.parse(script.read_text()).body
    imports = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
    own = [node for node in imports if isinstance(node, ast.ImportFrom)]
    names = [str(node.module) for node in own]
    first = next(name for name in names if name.partition(".")[0] not in sys.stdlib_module_names)
    assert first == "dataset.packages"
    call = body[body.index(own[names.index(first)]) + 1]
    assert ast.unparse(call).startswith("require_packages(")


def test_ctrl_c_while_packages_are_imported_is_one_line(tmp_path: Path) -> None:
    package, ready = tmp_path / "packages" / "numpy", tmp_path / "importing"
    package.mkdir(parents=True)
    text = f"import pathlib, time\npathlib.Path({str(ready)!r}).touch()\ntime.sleep(1000)\n"
    (package / "__init__.py").write_text(text)
    command = [str(ROOT / "scripts" / "index_tar.py"), "x.tar"]
    paths = {"PYTHONPATH": str(package.parent)}
    said = interrupt(command, tmp_path, lambda _: ready.exists(), **paths)
    assert said == "error: interrupted; run the same command again\n"


def has_bytes(folder: Path) -> bool:
    """Whether pictures have come from the processes that draw them."""
    return any(path.stat().st_size > 20_000 for path in folder.rglob("*.tar"))


def test_ctrl_c_in_a_command_with_processes_is_one_line_and_leaves_no_file(tmp_path: Path) -> None:
    """Its processes hear it too, and must not answer with tracebacks."""
    flags = ["--out", "here", "--classes", "9", "--train-per-class", "3000", "--processes", "2"]
    command = [str(ROOT / "scripts" / "make_fake_imagenet.py"), *flags, "--size", "32x32"]
    said = interrupt(command, tmp_path, lambda _: has_bytes(tmp_path / "here"))
    assert "Traceback" not in said and said.count("error: ") == 1
    assert not (tmp_path / "here" / "ILSVRC2012_img_train.tar").exists()
