"""What the modules of streamed runs share: their set, the local run of it, an end of what is left.

A module with another set, or with runs of another length, has fixtures of its own in their place.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.cluster.osdf.streamed_runs import Served, run_local, serve_set
from tests.train import started_ranks as ranks


@pytest.fixture
def no_leftovers() -> Iterator[None]:
    """Ends the runs that a failed test left."""
    yield
    ranks.end_leftovers()


@pytest.fixture(scope="module")
def served(osdf: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """64 MiB for a module, under a name of its own."""
    return serve_set(osdf, tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def local(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run from the local tars, in the streamed order."""
    return run_local(served, tmp_path_factory.mktemp("local"))
