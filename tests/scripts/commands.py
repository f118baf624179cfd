"""A script of the project as a command of its own, from any folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests import forked_command

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 250.0  # below pytest's own limit: then what it wrote is shown


def run_script(
    name: str, *words: object, cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """How a script of scripts/ ended, and what it wrote."""
    command = [sys.executable, str(ROOT / "scripts" / f"{name}.py"), *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=WAIT_S)


def fork_script(
    name: str, *words: object, cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The same in a process that has its packages already: forked_command says what that lacks."""
    script = ROOT / "scripts" / f"{name}.py"
    return forked_command.run_script(script, list(map(str, words)), cwd=cwd, env=env)
