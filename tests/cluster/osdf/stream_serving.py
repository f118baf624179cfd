"""What benchmarks/stream.py serves: its tar, or the shards that a peer made of it."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.stream_promises import MOSAIC, WEBDATASET
from tests.cluster.osdf import service, stream_ways
from tests.cluster.osdf.stream_ways import Run


class Served:
    """Files at the origin under a name of their own, in the memory of the caches."""

    def __init__(self, folder: Path, names: list[str], num_caches: int = 2) -> None:
        self.path = f"{service.PUBLIC}/bench-stream-{secrets.token_hex(4)}"
        self.paths = []
        for name in names:
            path = service.put(f"{Path(self.path).name}/{name}", folder / name)
            self.paths.append(path)
            for cache in service.BARE_CACHE_URLS[:num_caches]:
                subprocess.run(["curl", "-sf", "-o", os.devnull, cache + path], check=True)

    def close(self) -> None:
        service.remove(self.path)


def read_object(path: str) -> bytes:
    """The bytes of an object, from the origin."""
    command = ["curl", "-sf", service.BARE_ORIGIN_URL + path]
    return subprocess.run(command, check=True, capture_output=True).stdout


@contextmanager
def converted(name: str, run: Run, work: Path) -> Iterator[tuple[Run, float]]:
    """The run with the shards of a peer that needs them, and the seconds to make them."""
    if name not in (WEBDATASET, MOSAIC):
        yield run, 0.0
        return
    shards = work / "shards"
    conversion_s = stream_ways.convert(name, run.data, shards, run.python)
    served = Served(shards, sorted(path.name for path in shards.iterdir()), num_caches=1)
    shutil.rmtree(shards)
    try:
        yield replace(run, shards=tuple(served.paths)), conversion_s
    finally:
        served.close()
