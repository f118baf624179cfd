"""A job of condor/train.sub on a disk that is smaller than its tar, as HTCondor measures it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.cluster.condor.grid_mode import read_errors, read_output, read_result, submit_training
from tests.cluster.osdf.streamed_runs import STEPS, serve_set
from tests.dataset.tars import TRAIN
from tests.train.hooks import SMALL_UNITS

pytestmark = [pytest.mark.condor, pytest.mark.osdf, pytest.mark.timeout(500)]
CACHE_GB = 0.0094  # 15 % of the training tar, in GB of 2^30 bytes
# In place of PYTHON: the trainer takes the small units of the tests.
PYTHON = """#!/bin/bash
if [[ "$*" == "-m train "* ]]; then
    shift 2
    exec {python} {folder}/small_units.py "$@"
fi
exec {python} "$@"
"""
SMALL = """
import importlib, sys
for name, value in {units!r}.items():
    module, _, constant = name.rpartition(".")
    setattr(importlib.import_module(module), constant, value)
from train.run import main
sys.exit(main())
"""


def test_a_job_with_15_percent_of_the_disk_stays_below_it(
    condor: ModuleType, osdf: ModuleType, tmp_path: Path
) -> None:
    """HTCondor holds the job if its files ever have more bytes than the tar that it trains on."""
    served = serve_set(osdf, tmp_path)
    size_kib = (served.folder / TRAIN).stat().st_size // 1024
    python = PYTHON.format(python=condor.PYTHON, folder="$(dirname $(readlink -f $0))")
    job = submit_training(
        condor,
        append=f"periodic_hold = DiskUsage > {size_kib}",
        files={"python": python, "small_units.py": SMALL.format(units=SMALL_UNITS)},
        DATA=served.urls, FEDERATION=served.federation, PYTHON="FOLDER/python",
        CACHE_GB=f"{CACHE_GB}", EPOCHS="2",
        TRAIN="-a shufflenet_v2_x0_5 -b 8 --image-size 32 -j 0 --threads 1",
    )  # fmt: skip
    assert job.wait(timeout_s=400) == 0, read_output(job) + read_errors(job)
    run = read_result(job)
    (attempt,) = run["attempts"]
    stream = attempt["stream"]
    assert stream["cache_limit"] == int(CACHE_GB * 2**30) and not stream["is_whole"]
    assert stream["bytes_fetched"] > 1.5 * 1024 * size_kib  # what was freed came again
    assert f"step {2 * STEPS}/{2 * STEPS}" in read_output(job)
    assert int(job.attribute("RequestDisk")) == int((CACHE_GB + 10) * 1048576)
    used_kib = int(job.attribute("DiskUsage"))
    assert 0 < used_kib < size_kib
