"""The test SLURM itself: it behaves like a site's, keeps to loopback and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import psutil
import pytest
import submitit

from tests.cluster.lifetime import locked
from tests.cluster.slurm import processes
from tests.cluster.slurm.jobs import PATIENCE_S, wait_until
from tests.conftest import ROOT

pytestmark = pytest.mark.slurm


def test_srun_starts_one_task_on_each_of_four_nodes(slurm: ModuleType) -> None:
    show = 'echo "$SLURMD_NODENAME $SLURM_PROCID $SLURM_STEP_NUM_TASKS"'
    done = slurm.srun("--nodes=4", "--ntasks=4", "bash", "-c", show)
    assert sorted(done.stdout.splitlines()) == ["n1 0 4", "n2 1 4", "n3 2 4", "n4 3 4"], done.stderr


def find_listening(pid: int) -> list[str]:
    """The addresses on which a process listens."""
    try:
        connections = psutil.Process(pid).net_connections(kind="inet")
    except psutil.NoSuchProcess:  # of a step that has just ended
        return []
    return [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN]


def test_every_daemon_listens_on_loopback_only(slurm: ModuleType) -> None:
    addresses = [ip for pid in processes.find_processes() for ip in find_listening(pid)]
    assert len(addresses) == 1 + len(slurm.NODES)
    assert set(addresses) == {"127.0.0.1"}


def test_a_command_that_is_too_slow_leaves_no_job(slurm: ModuleType) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        slurm.srun("--job-name=too-slow", "sleep", "60", timeout_s=2)
    listed = slurm.run("squeue", "--noheader", "--name=too-slow", "--states=RUNNING")
    assert listed.stdout == ""


def test_submitit_runs_tasks_on_two_nodes(
    slurm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        monkeypatch.delenv(name)
    for name, value in slurm.clean_env().items():
        monkeypatch.setenv(name, value)
    executor = submitit.SlurmExecutor(folder=tmp_path)
    executor.update_parameters(nodes=2, ntasks_per_node=1, time=10, setup=[f"cd {ROOT}"])
    job = executor.submit(os.getenv, "SLURMD_NODENAME")
    assert slurm.Job(job.job_id).wait()["JobState"] == "COMPLETED"
    assert job.results() == ["n1", "n2"]


@pytest.fixture
def own_instance() -> Iterator[None]:
    """For one test run at a time on this machine."""
    with locked(Path(tempfile.gettempdir()) / "trainyard-slurm-7.test"):
        yield


def test_a_crashed_one_is_cleared_at_the_next_start_and_a_stop_leaves_nothing(
    own_instance: None, tmp_path: Path
) -> None:
    """On a second SLURM beside the one that the other tests use, with its own folder and ports."""
    ours = ("PYTEST_VERSION", "PYTEST_XDIST_WORKER")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    env |= {"TRAINYARD_INSTANCE": "7", "PYTHONPATH": str(ROOT)}
    _control("up", env)
    conf = _python("-c", "from tests.cluster.slurm.layout import CONF; print(CONF)", env=env)
    ignore_term = f'trap "" TERM; touch {tmp_path}/$SLURM_PROCID; exec sleep infinity'
    job = ["sbatch", "--output=/dev/null", f"--wrap=srun -n4 bash -c '{ignore_term}'", "--nodes=4"]
    subprocess.run(
        job, env=env | {"SLURM_CONF": conf}, check=True, capture_output=True, timeout=PATIENCE_S
    )
    wait_until(lambda: len(list(tmp_path.iterdir())) == 4, "the four tasks run")
    before = _processes(env)
    for pid in before:
        if Path(f"/proc/{pid}/comm").read_text().strip() == "slurmctld":
            os.kill(pid, 9)  # as a crash of the machine's tests would

    assert "down" in _control("status", env)
    _control("up", env)
    assert "up" in _control("status", env)
    after = _processes(env)
    assert not set(before) & set(after)
    _control("up", env)
    assert _processes(env) == after, "a second start changes nothing"

    _control("down", env)
    assert _processes(env) == []
    assert not Path(conf).parent.exists()
    assert not list(Path("/dev").glob("fakegpu7-*"))


def _control(action: str, env: dict[str, str]) -> str:
    return _python("-m", "tests.cluster", action, "slurm", env=env)


def _processes(env: dict[str, str]) -> list[int]:
    code = "from tests.cluster.slurm.processes import find_processes; print(*find_processes())"
    return [int(pid) for pid in _python("-c", code, env=env).split()]


def _python(*args: str, env: dict[str, str]) -> str:
    command = [sys.executable, *args]
    done = subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()
