"""Fixtures of the tests on real launchers, and the order of their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.mpi import install_mpirun

# The files that take longest, first: a worker takes whole files (--dist loadfile), and one that
# takes a long one last leaves the other without work. xdist's own order, most tests first, put the
# searches (one test each, 74 and 214 s on a busy machine) at the end. A file that is missing here,
# or is here in vain, costs a minute and no more.
LONGEST = (
    "slurm/test_preemption.py",
    "condor/test_grid_stories.py",
    "slurm/test_stream.py",
    "slurm/test_study.py",
    "condor/test_grid_search.py",
    "condor/test_grid_container.py",
    "osdf/test_stream_faults.py",
    "condor/test_grid_bounds.py",
    "slurm/test_train.py",
    "slurm/test_launchers.py",
    "slurm/test_search.py",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files of this folder before all others, which keep their order."""
    folder = Path(__file__).parent
    places = {folder / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(scope="session")
def mpirun() -> str:
    """The path of Open MPI's mpirun."""
    return install_mpirun()
