"""Other Pythons of this machine: pyenv's, beside the one that runs the tests, or the system's."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path


def find_pythons(*minors: int) -> list[Path]:
    """The Pythons 3.MINOR that are here and start; pyenv's name for one that was found is not."""
    versions, found = Path(sys.base_prefix).parent, []
    for minor in minors:
        own = sorted(versions.glob(f"3.{minor}.*/bin/python"))
        named = None if own else shutil.which(f"python3.{minor}")
        found += own or [path for path in [Path(named or "")] if named and _starts(path)]
    return found


def _starts(python: Path) -> bool:
    """Whether it does: pyenv has a file of that name for versions that are not in use, too."""
    return subprocess.run([python, "-c", ""], capture_output=True).returncode == 0
