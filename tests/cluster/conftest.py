"""Fixtures of the tests on real launchers."""

from __future__ import annotations

import pytest

from tests.cluster.mpi import install_mpirun


@pytest.fixture(scope="session")
def mpirun() -> str:
    """The path of Open MPI's mpirun."""
    return install_mpirun()
