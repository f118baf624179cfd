"""Whether this Python can run a command: its version and its packages, before they are imported.

Every command calls it first, so this file itself must be readable by old Pythons and need nothing.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

OLDEST_PYTHON = (3, 10)
USER_MISTAKE = 2  # as in dataset.errors, which old Pythons cannot import


def require_packages(*names: str) -> None:
    """Ends the process with one line and exit code 2 where the command cannot run."""
    problem = find_problem(*names)
    if problem:
        print(f"error: {problem}", file=sys.stderr, flush=True)
        raise SystemExit(USER_MISTAKE)


def find_problem(*names: str) -> str:
    """What this Python lacks and how to fix it, or an empty string."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        return f"{sys.executable} is Python {version}, and {oldest} or newer is needed; {fix()}"
    missing = [name for name in names if find_spec(name) is None]
    return describe_missing(*missing) if missing else ""


def describe_missing(*names: str) -> str:
    """The message about packages that are not installed."""
    return f"{sys.executable} has no {', '.join(names)}; {fix()}"


def fix() -> str:
    return "run `make setup` once, then start the command with .venv/bin/python"
