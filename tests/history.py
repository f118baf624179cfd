"""Whether a commit that a record names is in this repository's history."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def _git(*words: str) -> str | None:
    """What git answers, or None where it refuses or is not installed."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def assert_is_in_history(commit: str) -> None:
    """Fails for a commit that does not exist; a source archive or a shallow clone cannot tell."""
    assert commit and not commit.endswith("-dirty"), commit
    if _git("rev-parse", "--is-shallow-repository") == "false":
        assert _git("cat-file", "-t", commit) == "commit", commit
