"""A forked script says, does and ends as the same script in an interpreter of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked_command import run_script

SCRIPT = """
import atexit, os, signal, sys, threading, time
atexit.register(print, "at exit")
said = threading.Event()
threading.Thread(target=lambda: (said.wait(), time.sleep(0.1), print("from a thread"))).start()
print(sys.argv, os.getcwd(), os.environ['A'], sys.path[0], __name__, __file__)
print(sys.stdin.read(), os.isatty(1), signal.getsignal(signal.SIGINT), "torch" in sys.modules)
print([name for name in sys.modules if name.startswith(("dataset", "train.", "report", "scripts"))])
print("an error", file=sys.stderr)
said.set()
"""
ENDS = ["", "sys.exit()", "sys.exit(3)", "sys.exit('a message')", "os._exit(9)", "sys.exit(300)"]


@pytest.mark.parametrize("end", ENDS)
def test_outputs_and_exit_code_are_those_of_a_real_process(tmp_path: Path, end: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + end)
    (tmp_path / "there").mkdir()
    env = {"A": "1", "PATH": os.environ["PATH"]}
    words: list[str | Path] = ["one", "--two=2", Path("three")]
    real = subprocess.run(
        [sys.executable, script, *words],
        cwd=tmp_path / "there", env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    forked = run_script(script, words, cwd=tmp_path / "there", env=env)
    found = (forked.returncode, forked.stdout, forked.stderr)
    assert found == (real.returncode, real.stdout, real.stderr)


def test_an_uncaught_error_is_a_traceback_and_exit_1(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise ValueError('what went wrong')")
    done = run_script(script, [], cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: what went wrong"


def test_a_script_that_does_not_end_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import time; open({str(tmp_path / 'here')!r}, 'w'); time.sleep(1000)")
    with pytest.raises(subprocess.TimeoutExpired):
        run_script(script, [], cwd=tmp_path, timeout_s=2.0)
