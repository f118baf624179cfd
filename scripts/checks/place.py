"""Where this process is, as far as the next command depends on it: folders, tools, Python, GPUs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from dataset.packages import PINNED_PYTHONS, find_python
from scripts.checks.supply_state import DataState
from train.ranks.launch import Launch

TOOLS = ("sbatch", "srun", "condor_submit", "make")
SINFO_S = 5.0
NO_DATA = DataState()


@dataclass(frozen=True)
class Place:
    """All that decides the next command."""

    root: Path  # of the project
    cwd: Path
    python: str  # this one, absolute
    env: Mapping[str, str]
    tools: frozenset[str]  # those of sbatch, srun, condor_submit and make that are here
    launch: Launch | None = None  # None: contradictory
    data: DataState = NO_DATA
    num_gpus: int = 0  # that torch can use here
    has_cluster_gpus: bool = True  # what SLURM says of its nodes
    doctor_flags: tuple[str, ...] = ()  # as they were given
    output: str = ""  # where runs shall go, if that was given
    federation: str = ""  # if another than OSDF was given
    has_wheels: bool = True  # whether the pinned packages have wheels for this Python
    setup_python: str = ""  # to name to `make setup`, where python3 is not right

    def absolute(self, path: Path | str) -> Path:
        """Links are kept, as the user named them."""
        return Path(os.path.normpath(self.cwd / path))

    def show(self, path: Path | str) -> str:
        """A path as one would type it here: relative where it lies below this folder."""
        absolute = self.absolute(path)
        is_below = absolute.is_relative_to(self.cwd)
        return str(absolute.relative_to(self.cwd) if is_below else absolute)

    def in_project(self, name: str) -> str:
        return self.show(self.root / name)

    @property
    def python_word(self) -> str:
        return self.show(self.python)


def find_tools() -> frozenset[str]:
    """The programs on PATH that a next command may be of."""
    return frozenset(tool for tool in TOOLS if shutil.which(tool))


def count_gpus(torch: ModuleType | None) -> int:
    """The GPUs that torch can use here."""
    return torch.cuda.device_count() if torch is not None and torch.cuda.is_available() else 0


def ask_for_gpus() -> bool:
    """Whether a node of this cluster has a GPU; yes where SLURM does not say."""
    command = ["sinfo", "--noheader", "--format=%G"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SINFO_S)
    except (OSError, subprocess.TimeoutExpired):
        return True
    return done.returncode != 0 or not done.stdout.strip() or "gpu" in done.stdout


def choose_setup_python() -> str:
    """The Python to name to `make setup`; empty where its own choice, python3, is right."""
    usual = shutil.which("python3")
    if sys.version_info[:2] not in PINNED_PYTHONS:
        return find_python()
    is_usual = usual is not None and os.path.realpath(usual) == os.path.realpath(sys.executable)
    return "" if is_usual else sys.executable
