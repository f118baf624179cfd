"""Where the pool keeps its files and listens, its configuration, and what it sees of the host."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from tests.cluster.lifetime import instance, state_folder
from tests.cluster.ports import FIRST

PROJECT = Path(__file__).resolve().parents[3]
HOME = state_folder("condor")
ROOT = HOME / "root"  # the pool's /
# The jobs' folders, at this path inside and outside; DAGMan refuses to keep its log below /tmp.
WORK = Path("/var/tmp") / HOME.name
PORT = FIRST + 50 + 100 * instance()
IMAGE = Path("/srv/debian")  # in the pool: the Debian root as it was made, a container's image
BIG = "Trainyard-Big"  # the sites: GLIDEIN_ResourceName of the two slot types
SMALL = "Trainyard-Small"


def python_paths() -> list[Path]:
    """What a .venv needs at the same paths: the Python that it links to, and what it is a link to.

    It is a link itself after `make setup VENV=...`.
    """
    venv = PROJECT / ".venv"
    elsewhere = [venv.resolve()] if venv.is_symlink() else []
    base = Path(sys.base_prefix)
    if base != Path("/usr"):
        return [base, *elsewhere]
    executable = Path(os.path.realpath(sys.executable))
    library = Path(sysconfig.get_path("stdlib", vars={"base": sys.base_prefix}))
    return [executable, library, *elsewhere]


CONFIG = f"""\
use ROLE: Personal
use SECURITY: HOST_BASED
CONDOR_HOST = 127.0.0.1
NETWORK_INTERFACE = 127.0.0.1
BIND_ALL_INTERFACES = False
ENABLE_IPV6 = False
COLLECTOR_HOST = 127.0.0.1:{PORT}
SHARED_PORT_PORT = {PORT}
ALLOW_READ = *
ALLOW_WRITE = *
ALLOW_ADMINISTRATOR = *
ALLOW_DAEMON = *
ALLOW_NEGOTIATOR = *
UID_DOMAIN = pool
# As on a grid, where submit and execute machines share no files: everything is transferred.
STARTD.FILESYSTEM_DOMAIN = elsewhere
STARTER.FILESYSTEM_DOMAIN = elsewhere
# The sandbox of a job must see the folders that tests share with it, /tmp included.
MOUNT_UNDER_SCRATCH =
RUNBENCHMARKS = False
# A site shows its containers what its jobs need, as others do with a shared file system.
SINGULARITY_BIND_EXPR = "{" ".join(map(str, [PROJECT, WORK, *python_paths()]))}"

# Two kinds of slot, at two sites. Their sizes are claims: what jobs ask for on the OSPool fits.
NUM_CPUS = 17
MEMORY = 65024
SLOT_TYPE_1 = cpus=16, memory=64512, gpus=100%, disk=90%
SLOT_TYPE_1_PARTITIONABLE = True
NUM_SLOTS_TYPE_1 = 1
SLOT_TYPE_2 = cpus=1, memory=512, gpus=0, disk=5%
SLOT_TYPE_2_PARTITIONABLE = False
NUM_SLOTS_TYPE_2 = 1
SLOT_TYPE_1_GLIDEIN_ResourceName = "{BIG}"
SLOT_TYPE_2_GLIDEIN_ResourceName = "{SMALL}"
STARTD_ATTRS = $(STARTD_ATTRS) GLIDEIN_ResourceName
NEGOTIATOR_PRE_JOB_RANK = MY.GLIDEIN_ResourceName == "{BIG}"
use feature:gpus
MACHINE_RESOURCE_INVENTORY_GPUS = /etc/condor/find_gpus

# A pool of hours in the time of a test.
NEGOTIATOR_INTERVAL = 2
NEGOTIATOR_MIN_INTERVAL = 1
NEGOTIATOR_CYCLE_DELAY = 1
SCHEDD_INTERVAL = 2
SCHEDD_MIN_INTERVAL = 1
UPDATE_INTERVAL = 5
PERIODIC_EXPR_INTERVAL = 5
PERIODIC_EXPR_TIMESLICE = 1
DAGMAN_USER_LOG_SCAN_INTERVAL = 1
# A job starts here within the second in which its shadow does, and HTCondor 23.9 then ignores its
# allowed_execute_duration. A job with +HookKeyword = "SLOWSTART" starts in the next second.
SLOWSTART_HOOK_PREPARE_JOB = /etc/condor/slow_start
"""
# Two simulated A100; a simulated GPU says nothing of its driver, so this does.
FIND_GPUS = r"""#!/bin/sh
/usr/libexec/condor/condor_gpu_discovery -properties -simulate:4,2 |
    sed 's/^Common=\[/& MaxSupportedVersion=13020;/'
"""
SLOW_START = "#!/bin/sh\nexec sleep 1.1\n"
