"""What one fetch was told (the settings of its command), and what it did (the summary)."""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dataset.errors import UserError
from dataset.federation.lookup import Options
from dataset.federation.pelican import Target, parse_target
from dataset.federation.tokens import Access, TokenStore
from dataset.redaction import printable, redact

log = logging.getLogger("trainyard.fetch")

METHODS = ("auto", "osdf", "https", "native")
NATIVE_LIMIT_MB = 5000  # MAX_TRANSFER_INPUT_MB of the OSPool's access points


@dataclass(frozen=True)
class Request:
    """The settings of one fetch command."""

    out: Path
    options: Options = field(default_factory=Options)
    federation: str | None = None
    token: Path | None = None
    netrc: Path | None = None
    given: Mapping[str, str] = field(default_factory=dict)  # kind -> hex
    index: Path | None = None
    recursive: bool = False
    method: str = "auto"
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    own_files: tuple[Path, ...] = ()  # what the command itself writes: no object gets their names

    def __post_init__(self) -> None:
        if self.index is not None and not self.index.is_file():
            raise UserError(f"--index {self.index}: no such file; give a TAR.index or leave it out")
        if self.index is not None and not zipfile.is_zipfile(self.index):
            raise UserError(f"--index {self.index} is no index; give a TAR.index or leave it out")

    @property
    def access(self) -> Access:
        return Access(self.environ, TokenStore(self.environ, self.token, os.getuid()), self.netrc)

    def parse(self, url: str) -> Target:
        """The target of a URL with the chosen method."""
        target = parse_target(url, self.federation)
        if self.method == "https" and target.scheme == "pelican":
            return replace(target, directread=True)  # the study's method 2: the origin, no cache
        if self.method == "osdf" and target.scheme != "pelican":
            raise UserError(
                f"--method osdf needs an osdf:// or pelican:// URL, not {target.identity}"
            )
        if self.method == "native":
            return self._parse_native(target)
        return target

    def _parse_native(self, target: Target) -> Target:
        """What HTCondor itself put into the job's scratch folder (the study's method 1)."""
        scratch = self.environ.get("_CONDOR_SCRATCH_DIR")
        if not scratch:
            raise UserError(
                "--method native takes what HTCondor transferred into a job: there is no "
                "_CONDOR_SCRATCH_DIR here. List the file in transfer_input_files"
            )
        path = Path(scratch) / target.name
        if path.is_file():
            check_native_size(target.name, path.stat().st_size)
        return parse_target(str(path))


def check_native_size(name: str, size: int) -> None:
    """Refuses what HTCondor's own file transfer does not take on the OSPool."""
    if size > NATIVE_LIMIT_MB * 1_000_000:
        raise UserError(
            f"{name} has {size / 1e9:.1f} GB, and HTCondor's native transfer takes 5 GB of input "
            "a job on the OSPool, however it is split: the job is held with 'TransferInputSizeMB "
            f"({size // 1_000_000}) is greater than MAX_TRANSFER_INPUT_MB ({NATIVE_LIMIT_MB}) at "
            "submit time' (code 32). Use --method osdf"
        )


@dataclass
class Summary:
    """One object, or all small files of a collection."""

    url: str
    path: str
    size: int = 0
    status: str = "failed"
    seconds: float = 0.0
    resumed_bytes: int = 0
    fetched_bytes: int = 0
    bytes_twice: dict[str, int] = field(default_factory=dict)
    sources: list[dict[str, Any]] = field(default_factory=list)
    hedges: int = 0
    lookups: int = 0
    verified: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: str | None = None

    def say(self, note: str) -> None:
        """Logs a fact for the user now, and keeps it for the summary."""
        note = printable(redact(note))
        log.info("%s", note)
        self.notes.append(note)
