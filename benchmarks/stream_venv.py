"""An environment of its own for mosaicml-streaming, which wants an older numpy than we have.

It is made once, below the cache of the benchmarks. torch comes from the environment that runs the
benchmark; nothing there is changed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from benchmarks.bench import CACHE

FOLDER = CACHE / "mosaicml-streaming"
PEER = "mosaicml-streaming==0.13.0"
# What it imports. Its clients of cloud storage, some hundred packages, are not used here.
NEEDED = (
    "numpy<2.2",
    "transformers<5",
    "xxhash<4",
    "zstd<2",
    "python-snappy<1",
    "Brotli",
    "catalogue<3",
    "tqdm",
    "requests",
)


def find_mosaic() -> Path | None:
    """Its Python, which is made on first use; None where it cannot be installed."""
    python = FOLDER / "bin" / "python"
    if not (FOLDER / "ready").exists():
        shutil.rmtree(FOLDER, ignore_errors=True)
        if not _make(python):
            shutil.rmtree(FOLDER, ignore_errors=True)
            return None
        (FOLDER / "ready").touch()
    return python


def _make(python: Path) -> bool:
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
    pip += ["--disable-pip-version-check"]
    commands = [
        [sys.executable, "-m", "venv", "--without-pip", str(FOLDER)],
        [*pip, "--no-deps", PEER],
        [*pip, *NEEDED],
    ]
    if any(subprocess.run(command, check=False).returncode for command in commands):
        return False
    ours = sysconfig.get_path("purelib")
    theirs = next(FOLDER.glob("lib/python*/site-packages"))
    (theirs / "zz-torch.pth").write_text(f"{ours}\n")  # behind its own packages
    done = subprocess.run([str(python), "-c", "import streaming"], check=False)
    return done.returncode == 0
