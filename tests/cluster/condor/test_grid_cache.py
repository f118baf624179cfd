"""A job of condor/train.sub on a disk that is smaller than its tar, as HTCondor measures it.

The pool holds every job whose files have more bytes than it asked for. The request is the one that
condor/train.sub makes of CACHE_GB: that much, and OTHER_GB for code, checkpoints and the index. The
small model of a test fills megabytes of OTHER_GB, so that no cache of a test could ever go over the
request. A file without blocks has the rest: HTCondor adds up sizes, and to HTCondor the job has as
little room left as one at ImageNet's size.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.cluster.condor.grid_mode import (
    find_sandbox,
    read_errors,
    read_output,
    read_result,
    submit_training,
)
from tests.cluster.condor.jobs import Job
from tests.cluster.osdf.streamed_runs import STEPS, Served, serve_set
from tests.dataset.tars import TRAIN
from tests.train.cache_sizes import sampling
from tests.train.hooks import SMALL_UNITS

pytestmark = [pytest.mark.condor, pytest.mark.osdf, pytest.mark.timeout(900)]
CACHE_GB = 0.0094  # 15 % of the training tar, in GB of 2^30 bytes
LIMIT = int(CACHE_GB * 2**30)
OTHER_GB = 10  # what condor/train.sub asks for beside the data, if nothing else is said
SMALL_OTHER_GB = 3  # what docs/grid.md names for small disks
OWN_FILES = 16 << 20  # of OTHER_GB, for what the run writes: its checkpoint, model and records
# The starter measures once a second, and not every five minutes. The shadow looks at the policy.
POLICY = """
SYSTEM_PERIODIC_HOLD = JobStatus == 2 && DiskUsage > RequestDisk
SYSTEM_PERIODIC_HOLD_REASON = "more disk than requested"
STARTER_INITIAL_UPDATE_INTERVAL = 1
STARTER_UPDATE_INTERVAL = 1
"""
# In place of PYTHON: the trainer takes the small units of the tests, in a sandbox that is filled.
PYTHON = """#!/bin/bash
if [[ "$*" == "-m train "* ]]; then
    shift 2
    exec {python} {folder}/small_units.py "$@"
fi
exec {python} "$@"
"""
SMALL = """
import importlib, pathlib, runpy
used = sum(path.lstat().st_size for path in pathlib.Path().rglob("*") if not path.is_dir())
with open("ballast", "wb") as file:
    file.truncate({rest} - used)
for name, value in {units!r}.items():
    module, _, constant = name.rpartition(".")
    setattr(importlib.import_module(module), constant, value)
runpy.run_module("train", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def served(osdf: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return serve_set(osdf, tmp_path_factory.mktemp("served"))


@pytest.fixture
def strict_pool(condor: ModuleType) -> Iterator[ModuleType]:
    """The pool, with a policy that holds a job over its request."""
    condor.configure(POLICY)
    yield condor
    condor.configure("")


def find_ballast(other_gb: int) -> int:
    """The bytes that fill the sandbox: what is asked for beside the data, less the run's own."""
    return (other_gb << 30) - OWN_FILES


def submit(condor: ModuleType, served: Served, other_gb: int, **macros: str) -> Job:
    """A job that streams, and whose own files are as large as the request has room for them."""
    python = PYTHON.format(python=condor.PYTHON, folder="$(dirname $(readlink -f $0))")
    small = SMALL.format(units=SMALL_UNITS, rest=find_ballast(other_gb))
    return submit_training(
        condor,
        files={"python": python, "small_units.py": small},
        DATA=served.urls, FEDERATION=served.federation, PYTHON="FOLDER/python",
        TRAIN="-a shufflenet_v2_x0_5 -b 8 --image-size 32 -j 0 --threads 1",
        **macros,
    )  # fmt: skip


def read_disk(job: Job) -> tuple[int, int]:
    """(the most that HTCondor saw, the request) in KiB; the schedd rounds DiskUsage up by 25 %."""
    return int(job.attribute("DiskUsage_RAW")), int(job.attribute("RequestDisk"))


def test_a_job_with_15_percent_of_the_disk_stays_within_its_request(
    strict_pool: ModuleType, served: Served
) -> None:
    size = (served.folder / TRAIN).stat().st_size
    limits = {"CACHE_GB": f"{CACHE_GB}", "OTHER_GB": f"{SMALL_OTHER_GB}"}
    job = submit(strict_pool, served, SMALL_OTHER_GB, EPOCHS="2", **limits)
    job.wait_for("EXECUTE")
    sandbox = find_sandbox(strict_pool, job)
    assert sandbox is not None
    with sampling(sandbox / "data") as sizes:
        assert job.wait() == 0, read_output(job) + read_errors(job)
    (attempt,) = read_result(job)["attempts"]
    stream = attempt["stream"]
    assert stream["cache_limit"] == LIMIT and not stream["is_whole"]
    assert stream["bytes_fetched"] > 1.5 * size  # what was freed came again
    assert f"step {2 * STEPS}/{2 * STEPS}" in read_output(job)
    assert 0.5 * LIMIT < max(sizes) <= LIMIT
    used, request = read_disk(job)
    assert request == int((CACHE_GB + SMALL_OTHER_GB) * 1048576)
    # The ballast counts, and all of the limit was in use: 6 MB of the request are left.
    assert (find_ballast(SMALL_OTHER_GB) + 0.5 * LIMIT) / 1024 < used <= request


def test_a_job_that_keeps_the_whole_tar_on_such_a_disk_is_held(
    strict_pool: ModuleType, served: Served
) -> None:
    """The same request without a limit for the cache: the policy of the pool is at work."""
    job = submit(strict_pool, served, OTHER_GB, DATA_GB=f"{CACHE_GB}", EPOCHS="200")
    held = job.wait_for("JOB_HELD")
    assert "more disk than requested" in held["HoldReason"], held["HoldReason"]
    used, request = read_disk(job)
    assert request == int((CACHE_GB + OTHER_GB) * 1048576) < used
    job.act("rm")
