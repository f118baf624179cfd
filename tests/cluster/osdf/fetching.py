"""Fetching in a test: one call, its exit code and summary, against the mini-OSDF."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from dataset.checksum import compute
from dataset.errors import CommandError, describe_os_error
from dataset.federation.lookup import Options
from dataset.fetch.request import Request, Summary
from dataset.fetch.urls import fetch_urls
from dataset.own_names import PART

MIB = 1 << 20
FAST = Options(stall_s=1.0, give_up_s=100.0, missing_s=1.0)  # the 1 s timeouts of the fault tests


@dataclass
class Result:
    """How a fetch ended."""

    exit_code: int
    message: str
    seconds: float
    summaries: list[Summary]
    path: Path

    @property
    def summary(self) -> Summary:
        return self.summaries[-1]

    @property
    def wasted(self) -> int:
        """Hedged and wrong bytes, which the issue bounds."""
        return self.summary.bytes_twice["hedged"] + self.summary.bytes_twice["wrong"]

    @property
    def errors(self) -> dict[str, int]:
        """problem -> how often, over all sources."""
        found: dict[str, int] = {}
        for source in self.summary.sources:
            for problem, count in source["errors"].items():
                found[problem] = found.get(problem, 0) + count
        return found


@dataclass
class Fetcher:
    """Fetches from one federation into one folder, in this process."""

    osdf: ModuleType
    out: Path
    options: Options = FAST
    given: Mapping[str, str] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    token: Path | None = None
    federation: str = ""

    def __call__(self, path: str, **changes: Any) -> Result:
        """Fetches an object by its path in the federation; Options' fields can be changed."""
        request = Request(
            self.out,
            replace(self.options, **changes),
            self.federation or self.osdf.DIRECTOR_HTTP_URL,
            self.token,
            given=self.given,
            environ={"HOME": "/nonexistent", "XDG_RUNTIME_DIR": "/nonexistent", **self.environ},
        )
        local = self.out / path.rpartition("/")[2]
        started = time.monotonic()
        code, message, summaries = 0, "", []
        try:
            summaries = fetch_urls([f"osdf://{path}"], request)
        except CommandError as error:
            code, message = error.exit_code, str(error)
            summaries = getattr(error, "summaries", [])
        except OSError as error:
            text = describe_os_error(error)
            if text is None:
                raise
            code, message = 2, text
        return Result(code, message, time.monotonic() - started, summaries, local)


def make_content(num_bytes: int, seed: int = 0) -> bytes:
    """Bytes that differ everywhere, so that no piece can stand in for another."""
    return np.random.default_rng(seed).bytes(num_bytes)


def write_index(path: Path, content: bytes) -> Path:
    """The part of a TAR.index that fetch reads: block checksums."""
    blocks = [content[at : at + 4 * MIB] for at in range(0, len(content), 4 * MIB)]
    with path.open("wb") as file:
        np.savez(
            file,
            tar_size=np.int64(len(content)),
            block_size=np.int64(4 * MIB),
            block_crc32c=np.array([compute("crc32c", block) for block in blocks], np.uint32),
        )
    return path


def leftovers(folder: Path) -> list[str]:
    """What a finished fetch must not leave."""
    return sorted(name for name in os.listdir(folder) if PART in name)
