"""What every command does with what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SAY = """
import logging, sys
from dataset.errors import run_command
def main():
    logging.basicConfig(stream=sys.stdout, level="INFO", format="%(message)s")
    logging.info("run %s", sys.argv[1])
run_command(main)
"""


def test_a_path_that_is_not_utf8_is_said_and_is_no_traceback() -> None:
    """Python is strict about standard output in most locales; C and POSIX are the exceptions."""
    command: list[str | bytes] = [sys.executable, "-c", SAY, b"a\xff b"]
    env = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    said = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    assert (said.stdout, said.stderr) == ("run a\\udcff b\n", "")
