"""Whether a filesystem has the bytes and the inodes for what is to be written."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dataset.errors import UserError


def check_room(folder: Path, sizes: npt.NDArray[np.int64], num_folders: int) -> None:
    """Raises UserError unless the filesystem has the bytes and the inodes that files need."""
    stat = os.statvfs(folder)
    block = stat.f_frsize or 4096
    needed = int((-(-sizes // block)).sum()) * block
    free = stat.f_bavail * block
    if needed > free:
        raise UserError(
            f"{folder} has {free / 1e9:.2f} GB free, the images need {needed / 1e9:.2f} GB; "
            "free some space or choose another --output_dir"
        )
    num_files = len(sizes) + num_folders
    if stat.f_files and num_files > stat.f_favail:
        raise UserError(
            f"{folder} has {stat.f_favail} free inodes, {num_files} files and folders are needed; "
            "choose another --output_dir, or train from the tar (scripts/index_tar.py)"
        )
