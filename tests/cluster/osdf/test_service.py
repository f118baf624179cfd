"""The mini-OSDF starts and stops without a trace, after a crash of the test run too.

These tests use an instance of their own, in other processes, so that nobody's service is disturbed.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator

import pytest

from tests.cluster.lifetime import find_marked
from tests.cluster.ports import wait_until_free
from tests.cluster.spare_instance import SpareInstance

pytestmark = pytest.mark.osdf
SPARE = SpareInstance("osdf")
FOLDER = SPARE.folder


@pytest.fixture(autouse=True)
def own_instance() -> Iterator[None]:
    with SPARE.reserved():
        yield


def test_down_leaves_no_process_and_no_file_and_can_be_repeated() -> None:
    done = SPARE.run("service.up(); assert service.is_up(); service.up()")
    assert done.returncode == 0, done.stderr
    assert len(find_marked(FOLDER)) == 4  # a person's service outlives the process that started it
    done = SPARE.run(
        "assert service.is_up(); service.down(); assert not service.is_up(); service.down()"
    )
    assert done.returncode == 0, done.stderr
    assert find_marked(FOLDER) == []
    assert not FOLDER.exists()


def test_service_of_a_killed_test_run_is_cleared_by_the_next_start() -> None:
    died = SPARE.run(
        "import os; service.up(); service.put('x', b'old'); os.kill(os.getpid(), 9)",
        PYTEST_VERSION="9",
    )
    assert died.returncode == -signal.SIGKILL
    left = set(find_marked(FOLDER))
    assert len(left) == 4
    done = SPARE.run("assert not service.is_up(); service.up(); print(service.traffic())")
    assert done.returncode == 0, done.stderr
    assert not left & set(find_marked(FOLDER))
    assert not (FOLDER / "origin/data/public/x").exists()


def test_half_dead_service_is_not_up_and_is_started_again() -> None:
    assert SPARE.run("service.up(); service.stop_server('origin')").returncode == 0
    done = SPARE.run("assert not service.is_up(); service.up(); assert service.is_up()")
    assert done.returncode == 0, done.stderr


def test_last_of_two_test_runs_stops_the_service() -> None:
    """The one that started it leaves first: the other goes on using it and stops it at its end."""
    program = (
        "import subprocess, sys\n"
        "service.up()\n"
        "other = subprocess.Popen([sys.executable, '-c', '''\n"
        "from tests.cluster.osdf import service\n"
        "service.up(); print(1, flush=True); input(); assert service.is_up()'''],\n"
        "    stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "other.stdout.readline()\n"
        "service.down()\n"
        "assert service.is_up()\n"
        "other.communicate(b'go\\n')\n"
        "assert other.returncode == 0\n"
    )
    done = SPARE.run(program, PYTEST_VERSION="9")
    assert done.returncode == 0, done.stderr
    assert find_marked(FOLDER) == []


def test_port_that_is_taken_is_named_with_a_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"port {port} is taken.*TRAINYARD_INSTANCE"):
            wait_until_free(port, patience_s=0)
    wait_until_free(port, patience_s=0)


def test_stopped_cache_breaks_connections_and_comes_back_with_its_data() -> None:
    program = (
        "from tests.cluster.osdf.client import request\n"
        "from tests.cluster.osdf.objects import wait_until_kept\n"
        "import http.client\n"
        "service.up()\n"
        "url = service.CACHE_HTTP_URLS[1] + service.put('x', b'content')\n"
        "assert request(url).content == b'content'\n"
        f"wait_until_kept({str(FOLDER / 'cache2')!r})\n"
        "service.stop_server('cache2')\n"
        "try:\n    request(url)\nexcept http.client.RemoteDisconnected:\n    print('broken')\n"
        "service.start_server('cache2')\n"
        "service.stop_server('origin')\n"
        "assert request(url).content == b'content'\n"
    )
    done = SPARE.run(program)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "broken\n"
