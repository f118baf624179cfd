"""A folder of class folders: which of them are classes, and which files are their images."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from dataset.archive.member_names import show
from dataset.errors import UserError
from dataset.names import is_hidden, is_image
from dataset.words import count

_log = logging.getLogger("trainyard")


def list_classes(root: Path) -> list[str]:
    """The class folders in bytewise order, without hidden ones such as .ipynb_checkpoints."""
    with os.scandir(root) as entries:
        seen = [entry for entry in entries if not is_hidden(os.fsencode(entry.name))]
    broken = [e.path for e in seen if e.is_symlink() and not Path(e.path).exists()]
    if broken:  # without it every later class would have another label
        raise UserError(f"{min(broken)} is a broken link; fix it, or remove it if it is no class")
    return sorted((entry.name for entry in seen if entry.is_dir()), key=os.fsencode)


def list_images(folder: Path) -> list[bytes]:
    """The images of a class folder in bytewise order, without pipes, sockets and folders."""
    found = sorted(_iter_images(folder))
    odd = [name for name, is_file in found if not is_file]
    if odd:
        text = "%s: %s is named like an image but is not a file: left out"
        _log.info(text, folder, show(odd[0]))
    return [name for name, is_file in found if is_file]


def has_image(folder: Path) -> bool:
    """Whether there is an image in a class folder; stops at the first."""
    return any(is_file for _, is_file in _iter_images(folder))


def refuse_empty(root: Path, empty: Sequence[str]) -> None:
    """Raises an error that names the class folders without an image."""
    if not empty:
        return
    shown = ", ".join(empty[:5]) + (", ..." if len(empty) > 5 else "")
    raise UserError(
        f"{count(len(empty), 'class folder')} of {root} without an image: {shown}; remove those "
        "that are no classes, or give --allow-empty-classes (in Python: allow_empty=True)"
    )


def _iter_images(folder: Path) -> Iterator[tuple[bytes, bool]]:
    """(name, whether it may be a file) of everything that is named like an image.

    A link may be a file: following a million links here would take minutes.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            name = os.fsencode(entry.name)
            if is_image(name):
                yield name, entry.is_file(follow_symlinks=False) or entry.is_symlink()
