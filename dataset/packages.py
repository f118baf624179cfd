"""Whether this Python can run a command: its version and its packages, before they are imported.

A Ctrl-C during those imports ends the command with one line, too.

Every command calls it first, so this file itself must be readable by old Pythons (3.6 is the
python3 of many clusters, and knows no `from __future__ import annotations`) and need nothing.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

OLDEST_PYTHON = (3, 10)
# Those for which all packages of requirements.txt have wheels; scripts/setup.sh has the same list.
PINNED_PYTHONS = ((3, 14), (3, 13), (3, 12), (3, 11))
USER_MISTAKE = 2  # as in dataset.errors, which old Pythons cannot import
INTERRUPTED = 130


def require_packages(*names: str) -> None:
    """Ends the process with one line and exit code 2 where the command cannot run."""
    if sys._getframe(1).f_globals.get("__name__") == "__main__":  # no test that imports a script
        _leave_on_interrupt()
    problem = find_problem(*names)
    if problem:
        print(f"error: {problem}", file=sys.stderr, flush=True)
        raise SystemExit(USER_MISTAKE)


def require_extra(name: str, install: str) -> None:
    """The same for a package that this command alone needs; `install` gets it."""
    if find_spec(name) is None:
        text = f"error: {sys.executable} has no {name}, which this command needs; {install}"
        print(text, file=sys.stderr, flush=True)
        raise SystemExit(USER_MISTAKE)


def find_problem(*names: str) -> str:
    """What this Python lacks and how to fix it, or an empty string."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST_PYTHON:
        problem = f"is Python {version}, and {'.'.join(map(str, OLDEST_PYTHON))} or newer is needed"
        return f"{sys.executable} {problem}; {fix(find_python())}"
    missing = [name for name in names if find_spec(name) is None]
    return describe_missing(*missing) if missing else ""


def describe_missing(*names: str) -> str:
    """The message about packages that are not installed."""
    return f"{sys.executable} has no {', '.join(names)}; {fix()}"


def fix(python: str = "") -> str:
    """What to do; `python` is the one to make the environment with, if it must be named."""
    setup = f"make setup PYTHON={python}" if python else "make setup"
    return f"run `{setup}` once, then start the command with .venv/bin/python"


def find_python() -> str:
    """A Python on PATH that the pinned packages have wheels for, or an empty string."""
    names = (f"python{major}.{minor}" for major, minor in PINNED_PYTHONS)
    return next((name for name in names if shutil.which(name) and _runs(name)), "")


def _runs(python: str) -> bool:
    """The shim of a version manager may be there without a Python behind it."""
    quiet = subprocess.DEVNULL
    return subprocess.call([python, "-c", ""], stdout=quiet, stderr=quiet) == 0


@contextmanager
def leave_at_once(tidy_up: "Callable[[], None]" = lambda: None) -> "Iterator[None]":
    """Within it a Ctrl-C is one line and the end: inside of an import it may be taken for another
    error. tidy_up: what is left to do then; it must not wait for anything."""

    def tidy_up_and_leave(_number: int, _frame: object) -> None:
        try:
            tidy_up()
        finally:
            leave()

    before = signal.getsignal(signal.SIGINT)
    _leave_on_interrupt(tidy_up_and_leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def leave(_number: int = signal.SIGINT, _frame: object = None) -> None:
    """What a Ctrl-C does when nothing has begun, or when all is over."""
    os.write(2, b"error: interrupted; run the same command again\n")
    os._exit(INTERRUPTED)


def _leave_on_interrupt(handler: "Callable[[int, object], None]" = leave) -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored
        signal.signal(signal.SIGINT, handler)
