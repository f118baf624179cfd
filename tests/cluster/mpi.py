"""Open MPI for the tests: installs mpirun where it is missing, and how root may call it."""

from __future__ import annotations

import shutil

from tests.cluster.lifetime import apt_install

# Open MPI refuses to run as root unless it is told twice; the machines of the tests have only root.
# Two ranks on a smaller machine are more than its slots; and a rank is not to be bound to one core.
MPI_ENV = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_plm_rsh_agent": "",  # no ssh here: all ranks are on this machine or in a SLURM job
}


def install_mpirun() -> str:
    """The path of mpirun, which is installed first where it is missing."""
    if shutil.which("mpirun") is None:
        apt_install("openmpi-bin")
    path = shutil.which("mpirun")
    assert path is not None
    return path
