"""What all tests share: the real services as fixtures, and an honest count of what was left out."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import signal
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import pytest

from dataset import redaction
from tests.cluster import SERVICES
from tests.cluster.osdf.health import ServerDied
from tests.gpu_sim import build as gpu_sim
from tests.gpu_sim.ranks import HAS_GPU
from tests.memory_folder import use_memory
from train.ranks.cpu_isa import limit_bf16

ROOT = Path(__file__).resolve().parents[1]

# A busy machine may be slow for a moment; no test asserts a timing. In CI the examples are the same
# every time: a change is not refused for what it did not break. Elsewhere they are drawn anew.
hypothesis.settings.register_profile(
    "busy", deadline=None, derandomize=os.environ.get("CI") == "true"
)
hypothesis.settings.load_profile("busy")

# Several processes of several spinning OpenMP threads on two cores bring each other to a halt:
# a step of 0.2 s was seen to take a minute. One thread a process, in children too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests of bf16 on a CPU that offers instructions and forbids them would end with SIGILL.
limit_bf16()

# A job in the background of a shell script starts with SIGINT ignored, and so would all children:
# the tests of Ctrl-C need what a terminal gives.
signal.signal(signal.SIGINT, signal.default_int_handler)

# While torch and the tests are imported, the collector finds nothing: 3.6 of 12.6 s of a core.
gc.disable()

_left_out: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run only the long repetitions")
    parser.addoption("--in-memory", action="store_true", help="files of tests in /dev/shm, if any")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Before pytest chooses a place for the folders of tests."""
    if config.getoption("--in-memory"):
        use_memory(os.environ)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what this machine cannot run, counted by reason."""
    wants_soak = config.getoption("--soak")
    reasons = {name: _service(name).missing() for name in SERVICES if _any_marked(items, name)}
    reasons["mpi"] = None if shutil.which("mpirun") or _can_install() else "needs Open MPI"
    reasons["gpusim"] = gpu_sim.missing()
    reasons["gpu"] = None if HAS_GPU else gpu_sim.missing()
    can_make_nodes = os.geteuid() == 0 and shutil.which("ip") is not None
    reasons["netns"] = None if can_make_nodes else "needs root and iproute2"
    reasons["browser"] = None if shutil.which("chromium") else "needs Chromium (make system)"
    kept, deselected = [], []
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        unmet = [f"{m}: {reasons[m]}" for m in sorted(marks & reasons.keys()) if reasons[m]]
        if ("soak" in marks) != wants_soak:
            deselected.append(item)
        elif unmet:
            _left_out[unmet[0]] += 1
            deselected.append(item)
        else:
            kept.append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=deselected)


def pytest_collection_finish() -> None:
    """What is there by now stays to the end: no later collection looks through it."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or packages complain at exit that their objects leak


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Each xdist worker collects everything: its counts are the counts, if it did not die."""
    found = getattr(node, "workeroutput", {})
    _left_out.update(Counter(found.get("left_out", {})) - _left_out)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With CI=true it is a failure to leave anything out."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(_left_out)
    elif os.environ.get("CI") == "true" and _left_out:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reason, count in _left_out.items():
        terminalreporter.write_line(f"LEFT OUT {count} tests: {reason}", yellow=True, bold=True)


def _any_marked(items: list[pytest.Item], name: str) -> bool:
    return any(item.get_closest_marker(name) for item in items)


def _can_install() -> bool:
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def _service(name: str) -> ModuleType:
    return importlib.import_module(f"tests.cluster.{name}.service")


def _run_service(name: str) -> Iterator[ModuleType]:
    """A running service; one that was up before (`make cluster-up`) is used and left running."""
    service = _service(name)
    was_up = service.is_up()
    service.up()
    yield service
    if not was_up:
        service.down()


@pytest.fixture(autouse=True)
def _no_secrets_of_other_tests() -> Iterator[None]:
    """What one test holds as a secret may be a word in the messages of the next."""
    yield
    redaction.forget_secrets()


@pytest.fixture(scope="session")
def slurm() -> Iterator[ModuleType]:
    """The real SLURM: 4 nodes x 4 GPUs on loopback."""
    yield from _run_service("slurm")


@pytest.fixture(scope="session")
def condor() -> Iterator[ModuleType]:
    """The real HTCondor pool."""
    yield from _run_service("condor")


@pytest.fixture(scope="session")
def osdf() -> Iterator[ModuleType]:
    """The real XRootD origin and caches behind the mini-director."""
    yield from _run_service("osdf")


@pytest.fixture(autouse=True)
def _living_servers(request: pytest.FixtureRequest) -> Iterator[None]:
    """A crash of XRootD, which is not ours to mend, costs the test that it happened in at most."""
    if "osdf" not in request.fixturenames:
        yield
        return
    service = request.getfixturevalue("osdf")
    _start_dead_servers(service, "before")
    yield
    _start_dead_servers(service, "in or after")


def _start_dead_servers(service: ModuleType, when: str) -> None:
    for found in service.start_dead_servers():
        warnings.warn(ServerDied(f"{when} this test, {found}"), stacklevel=1)
