"""The pool starts and stops without a trace, after a crash of the test run too.

These tests use an instance of their own, in other processes, so that nobody's pool is disturbed.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.cluster.lifetime import find_marked
from tests.cluster.spare_instance import SpareInstance

pytestmark = pytest.mark.condor
ROOT = Path(__file__).resolve().parents[3]
SPARE = SpareInstance("condor")
FOLDER = SPARE.folder
WORK = Path("/var/tmp") / FOLDER.name


@pytest.fixture
def own_instance() -> Iterator[None]:
    with SPARE.reserved():
        yield


def _find_by_name(text: str) -> list[str]:
    """The processes of this machine, in any namespace, with that text in their command line."""
    lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    return [line for line in lines.splitlines() if text in line]


def test_pool_of_a_killed_test_run_is_cleared_and_a_stop_leaves_nothing(
    own_instance: None,
) -> None:
    sleep = "98765.25"
    died = SPARE.run(
        "import os\n"
        "service.up()\n"
        "job = service.submit('executable = /bin/sleep\\ntransfer_executable = false\\n'\n"
        f"                     'arguments = {sleep}\\n')\n"
        "job.wait_for('EXECUTE')\n"
        "while not service.find_processes('sleep'): pass\n"
        "os.kill(os.getpid(), 9)\n",
        PYTEST_VERSION="9",
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert _find_by_name(f"sleep {sleep}")
    left = set(find_marked(FOLDER))
    assert left
    done = SPARE.run("assert not service.is_up()\nservice.up()\nassert service.is_up()")
    assert done.returncode == 0, done.stderr
    assert not _find_by_name(f"sleep {sleep}")
    assert not left & set(find_marked(FOLDER))
    done = SPARE.run("service.down()\nassert not service.is_up()\nservice.down()")
    assert done.returncode == 0, done.stderr
    assert find_marked(FOLDER) == []
    assert not FOLDER.exists()
    assert not WORK.exists()


def test_pool_has_no_mount_on_the_host_and_listens_on_loopback_only(condor: ModuleType) -> None:
    assert str(condor.ROOT) not in Path("/proc/mounts").read_text()
    listening = subprocess.run(["ss", "-Hltnup"], capture_output=True, text=True).stdout
    addresses = [line.split()[4] for line in listening.splitlines() if '"condor_' in line]
    assert any(address.endswith(f":{condor.PORT}") for address in addresses)
    assert {address.rsplit(":", 1)[0] for address in addresses} == {"127.0.0.1"}


def test_pool_of_another_clone_is_refused(condor: ModuleType) -> None:
    """Its jobs would not see this project."""
    program = (
        "from pathlib import Path\n"
        "from tests.cluster.condor import pool, service\n"
        "pool.PROJECT = Path('/another/clone')\n"
        "service.up()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert f"shows its jobs {ROOT} and not /another/clone" in done.stderr
    assert condor.is_up()


def test_commands_against_a_pool_that_is_down_say_so(own_instance: None) -> None:
    done = SPARE.run("service.run('condor_q')")
    assert "the HTCondor pool is down; `make cluster-up` starts it" in done.stderr


def test_settings_of_a_test_reach_the_daemons_and_are_taken_back(condor: ModuleType) -> None:
    question = "condor_config_val -startd STARTER_FILE_XFER_STALL_TIMEOUT"
    before = condor.run(question).strip()
    condor.configure("STARTER_FILE_XFER_STALL_TIMEOUT = 17\n")
    assert condor.run(question).strip() == "17"
    condor.configure("")
    assert condor.run(question).strip() == before != "17"
