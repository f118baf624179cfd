"""Runs a script of the project in a child forked from a process that has imported its packages.

Importing numpy and matplotlib costs a script 0.3 to 1.5 s of a core, a fork 20 ms. The child has
the arguments, folder, environment, outputs and exit code of `python SCRIPT ...`, and imports the
modules of the project itself. What it does not show: options of the interpreter (-S, -I), variables
that Python or a package reads while it is imported, and which packages a script imports. So every
script keeps tests that start it for real: tests/scripts/test_packages.py, and one of its own.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
OURS = ("dataset", "train", "report", "scripts", "condor")

_CONTEXT = multiprocessing.get_context("forkserver")


def run_script(
    script: Path,
    words: Sequence[str | Path],
    *,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 250.0,
) -> subprocess.CompletedProcess[str]:
    """`python SCRIPT WORDS...` from start to end, with its outputs."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = Path(folder, "stdout"), Path(folder, "stderr")
        process = start_script(script, words, cwd=cwd, env=env, outputs=outputs)
        argv = [str(script), *map(str, words)]
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(argv, timeout_s)
        stdout, stderr = (path.read_text() for path in outputs)
        return subprocess.CompletedProcess(argv, process.exitcode, stdout, stderr)


def start_script(
    script: Path,
    words: Sequence[str | Path],
    *,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    outputs: tuple[Path, Path],
) -> ForkServerProcess:
    """The same under way; outputs: the new files of its stdout and stderr."""
    argv = [str(script), *map(str, words)]
    args = (argv, cwd, dict(os.environ if env is None else env), outputs)
    process = _CONTEXT.Process(target=_be_script, args=args)
    # The standard library knows one server a process; the ranks of tests/train have their own.
    connect = _server().connect_to_new_process
    with mock.patch.object(forkserver, "connect_to_new_process", connect):
        process.start()
    return process


@functools.cache
def _server() -> forkserver.ForkServer:
    """The process that scripts are forked from."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload(["tests.forked_packages"])
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    with mock.patch.dict(os.environ, dict.fromkeys(names, "1")):
        server.ensure_running()
    return server


def _be_script(argv: list[str], cwd: Path, env: dict[str, str], outputs: Sequence[Path]) -> None:
    for fd, path in enumerate([Path(os.devnull), *outputs]):
        flags = os.O_RDONLY if fd == 0 else os.O_WRONLY | os.O_CREAT
        os.dup2(os.open(path, flags, 0o600), fd)
    # As a new interpreter opens them: a script that is killed loses what it has not flushed.
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv[:] = argv
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    elsewhere = [path for path in sys.path if path and Path(path).resolve() != ROOT]
    sys.path[:] = [str(Path(argv[0]).parent), *elsewhere]
    os._exit(_run_to_the_end(argv[0]))


def _run_to_the_end(script: str) -> int:
    """The exit code that the interpreter would end with."""
    code: object = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1
