"""Our transfer plugin called by a real HTCondor, against the real XRootD caches."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from types import ModuleType

import pytest

from dataset.own_names import PART
from tests.cluster.condor.grid_mode import ROOT, result_folder, submit_training
from tests.cluster.condor.jobs import Job
from tests.cluster.osdf.rules import Fault

pytestmark = [pytest.mark.condor, pytest.mark.osdf]
LOOK = "#!/bin/sh\nmkdir -p out data\nmd5sum *.tar >out/sums\nls -A >out/names\n"


@pytest.fixture(scope="module", autouse=True)
def _built_plugin() -> None:
    subprocess.run([sys.executable, ROOT / "scripts/build_plugin.py"], check=True)


def submit_with_plugin(
    condor: ModuleType, osdf: ModuleType, url: str, release_s: int = 1000, minutes: str = "5"
) -> Job:
    """A job that only looks at what the plugin brought."""
    return submit_training(
        condor,
        "executable = look.sh",
        {"look.sh": LOOK},
        DATA=url,
        FEDERATION=osdf.DIRECTOR_HTTP_URL,
        PLUGIN="true",
        PLUGIN_MINUTES=minutes,
        RELEASE_SECONDS=str(release_s),
    )


def test_a_file_arrives_through_htcondor_although_a_cache_stalls(
    condor: ModuleType, osdf: ModuleType
) -> None:
    content = os.urandom(6_000_000)
    path = osdf.put(f"grid-plugin/{os.urandom(4).hex()}.tar", content)
    with osdf.faults(Fault("stall", path=path, server="cache1", after_share=0.3)) as faults:
        job = submit_with_plugin(condor, osdf, f"osdf://{path}")
        assert job.wait() == 0
        assert sum(faults.hits()) > 0
    sums = (result_folder(job) / "sums").read_text()
    assert sums.split()[0] == hashlib.md5(content).hexdigest()
    names = (result_folder(job) / "names").read_text().split()
    assert not [name for name in names if name.endswith((PART, ".journal", ".jsonl"))]


def test_no_token_reaches_the_event_log(condor: ModuleType, osdf: ModuleType) -> None:
    token = osdf.make_token(lifetime_s=-60)
    path = osdf.put(f"grid-plugin/{os.urandom(4).hex()}.tar", b"x", namespace=osdf.PROTECTED)
    job = submit_with_plugin(condor, osdf, f"osdf://{path}?authz=Bearer%20{token}")
    held = job.wait_for("JOB_HELD")
    assert held["HoldReasonCode"] == 13
    log = job.log.read_text()
    assert "a token in the URL can be read by others" in log
    for secret in (token, token.split(".")[1], token.split(".")[2]):
        assert secret not in log
    job.act("rm")


def test_a_path_that_does_not_exist_is_held_and_not_released(
    condor: ModuleType, osdf: ModuleType
) -> None:
    """Another hold beside it, of a server that fails, is released: the pool did evaluate both."""
    broken = osdf.put(f"grid-plugin/{os.urandom(4).hex()}.tar", b"x")
    with osdf.faults(Fault("status", path=broken, status=503)):
        wrong = submit_with_plugin(
            condor, osdf, "osdf:///public/no/such.tar", release_s=1, minutes="2"
        )
        passing = submit_with_plugin(condor, osdf, f"osdf://{broken}", release_s=1, minutes="0.5")
        held = wrong.wait_for("JOB_HELD")
        assert held["HoldReasonCode"] == 13
        assert "will not be tried again" in held["HoldReason"]
        assert "does not exist" in held["HoldReason"]
        passing.wait_for("JOB_RELEASED")
        assert wrong.attribute("NumHolds") == "1"
        assert wrong.attribute("JobStatus") == "5"
    for job in (wrong, passing):
        job.act("rm")
