"""Other Pythons of this machine: pyenv's, beside the one that runs the tests, or the system's."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path


def find_pythons(*minors: int) -> list[Path]:
    """The Pythons 3.MINOR that are here and start."""
    versions = Path(sys.base_prefix).parent
    found = [path for minor in minors for path in sorted(versions.glob(f"3.{minor}.*/bin/python"))]
    named = [shutil.which(f"python3.{minor}") for minor in minors]
    found += [path for path in map(Path, filter(None, named)) if _starts(path)]
    return found


def _starts(python: Path) -> bool:
    """Whether it does: pyenv has a file of that name for versions that are not in use, too."""
    return subprocess.run([python, "-c", ""], capture_output=True).returncode == 0
