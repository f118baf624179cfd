"""Where the files of tests go with `--in-memory`: on a disk, each of many fsyncs waits for 7 ms.

Only for the part without services: a job of a scheduler may not see the memory of this machine.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

MEMORY = Path("/dev/shm")
MIN_FREE_BYTES = 4 << 30  # several times what the unit part holds at once
VARIABLE = "PYTEST_DEBUG_TEMPROOT"  # where pytest makes the folders of tmp_path


def use_memory(environ: MutableMapping[str, str], memory: Path = MEMORY) -> None:
    """Makes pytest put its folders there, if there is room and the user chose no place."""
    if has_room(memory):
        environ.setdefault(VARIABLE, str(memory))


def has_room(memory: Path, min_free_bytes: int = MIN_FREE_BYTES) -> bool:
    """Whether tests can write so much there, and run what they wrote."""
    try:
        disk = os.statvfs(memory)
    except OSError:
        return False
    can_run = not disk.f_flag & os.ST_NOEXEC
    free_bytes = min(disk.f_bavail * disk.f_frsize, _find_free_memory())
    return can_run and os.access(memory, os.W_OK) and free_bytes >= min_free_bytes


def _find_free_memory() -> int:
    """The bytes that Linux can give out without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0
