"""The flags of a command on the folder of a study or a search: status, resume, cancel, best."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dataset.flags import REQUIRED, flag, make_parser, parse_flags

Flags = TypeVar("Flags", bound="FolderFlags")


@dataclass(frozen=True, kw_only=True)
class FolderFlags:
    """The flags of a command on a study or a search that is there."""

    folder: Path = flag(REQUIRED, "the folder that --out named", "DIR")


@dataclass(frozen=True, kw_only=True)
class StatusFlags(FolderFlags):
    format: str = flag("md", None, choices=("md", "json"))


def parse_folder_flags(flags: type[Flags], script: str, words: list[str], example: str) -> Flags:
    """The flags of `SCRIPT status`, say; the first of the words is the command."""
    parser = make_parser(None, example, prog=f"{script} {words[0]}")
    return parse_flags(flags, parser, words[1:])


def choose_folder(out: Path | None, default: str) -> Path:
    """The folder of a new study or search: --out, or one named after the time."""
    return (out or Path(default) / time.strftime("%Y%m%d-%H%M%S")).absolute()
