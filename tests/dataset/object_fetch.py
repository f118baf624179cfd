"""The fetch of one small object, from a start of its own or after one that was killed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dataset.checksum import compute
from dataset.federation.lookup import Options
from dataset.fetch.request import Request, Summary
from dataset.fetch.urls import fetch_urls
from dataset.own_names import journal_path, part_path
from dataset.transfer.chunk_sums import compute_all
from dataset.transfer.journal import CHUNK, Arrivals, Journal, chunk_length, read_boot_id

# A busy machine may pause for a second: a hedge or a split then would be one more request.
FAST = Options(stall_s=5.0, give_up_s=20.0, missing_s=0.5, connections=4)
CONTENT = os.urandom(9 * CHUNK + 77)
NOWHERE = {"HOME": "/nonexistent", "XDG_RUNTIME_DIR": "/nonexistent"}
HELD = (0, 1, 2, 5)  # the chunks that an earlier start has fetched


def fetch(url: str, out: Path, options: Options = FAST, **fields: object) -> Summary:
    request = Request(out, options, environ=NOWHERE)
    (summary,) = fetch_urls([url], replace(request, **fields))  # type: ignore[arg-type]
    return summary


def leave_partial(path: Path, url: str, kinds: tuple[str, ...]) -> None:
    """What a kill leaves: the bytes of some chunks and the journal that vouches for them."""
    with open(part_path(path), "wb") as file:
        file.truncate(len(CONTENT))
        arrivals = Arrivals(url, len(CONTENT), kinds, read_boot_id(), sources=["an earlier one"])
        for chunk in HELD:
            view = memoryview(CONTENT)[chunk * CHUNK :][: chunk_length(chunk, len(CONTENT))]
            file.seek(chunk * CHUNK)
            file.write(view)
            arrivals.chunks[chunk] = (0, compute_all(kinds, view))
    Journal.create(journal_path(path), arrivals).close()


def make_index(folder: Path, content: bytes, kind: str = "crc32c") -> Path:
    """As much of a TAR.index as the fetch reads; crc32c is what earlier versions wrote."""
    block = 4 * CHUNK if kind == "crc32c" else CHUNK
    sums = [compute(kind, content[n : n + block]) for n in range(0, len(content), block)]
    arrays: dict[str, Any] = {f"block_{kind}": np.array(sums, np.uint32)}
    with open(folder / "object.bin.index", "wb") as file:
        np.savez(
            file,
            block_size=np.int64(block),
            tar_size=np.int64(len(content)),
            **arrays,
        )
    return folder / "object.bin.index"
