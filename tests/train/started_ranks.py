"""Runs the trainer on N ranks that are forked from one process which has imported torch already.

Importing torch costs 3.5 s of a core, a fork 20 ms: so a test can afford many starts and kills.
Every rank is a process of its own with torchrun's variables, and does what `python -m train` does,
with a network of two convolutions (tests/train/tiny_net.py) unless argv names another, and with a
heartbeat of 0.5 s in place of 1 s (tests/train/preload.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import multiprocessing
import os
import secrets
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from unittest import mock

from tests.gpu_sim.build import simulated_environment

Hook = Callable[[], None]  # called in a rank before the trainer starts; must be picklable

PR_SET_PDEATHSIG = 1
WAIT_S = 100.0  # below pytest's own limit: then the logs of the ranks are shown
LAUNCHERS = ("SLURM_", "OMPI_", "PMIX_", "TORCHELASTIC_", "SUBMITIT_", "_CONDOR_", "MASTER_")
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
ARCH = "tinynet"  # of ranks that name no other; not on simulated GPUs, nor in `python -m train`
# One small network of torchvision with batch norm, one thread: about 30 ms a step of 8 images.
REAL_ARCH = "shufflenet_v2_x0_5"
SMALL = [
    *("-a", REAL_ARCH, "-b", "8", "--image-size", "32", "--device", "cpu", "--threads", "1"),
    *("-j", "0", "--recipe", "sgd", "--lr", "0.05", "-p", "1", "--timeout-minutes", "1"),
]

# Above the services of tests/cluster, below what Linux gives to outgoing connections (32768 on).
FIRST_PORT, PORTS_OF_A_WORKER = 20000, 3000

_jobs: list[Job] = []
_port_numbers = itertools.count(secrets.randbelow(PORTS_OF_A_WORKER))  # two runs at once differ
_CONTEXT = multiprocessing.get_context("forkserver")


@dataclass
class Job:
    """The ranks of one start of the trainer; all of them write to one log, as under srun."""

    processes: list[ForkServerProcess]
    log_path: Path
    codes: list[int] = field(default_factory=list)

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def wait(self, timeout_s: float = WAIT_S) -> list[int]:
        """The exit code of each rank, -N for one that signal N ended."""
        deadline_s = time.monotonic() + timeout_s
        for rank, process in enumerate(self.processes):
            process.join(max(0.0, deadline_s - time.monotonic()))
            if process.exitcode is None:
                self.end()
                raise AssertionError(f"rank {rank} did not end in {timeout_s} s:\n{self.log}")
        self.codes = [int(process.exitcode or 0) for process in self.processes]
        return self.codes

    def expect(self, *codes: int) -> Job:
        """This job, once every rank has ended with one of the codes."""
        found = self.wait()
        assert set(found) <= set(codes), f"exit codes {found}, expected {codes}:\n{self.log}"
        return self

    def send(self, number: signal.Signals, *ranks: int) -> None:
        """A signal to some ranks, by default to all."""
        for rank in ranks or range(len(self.processes)):
            pid = self.processes[rank].pid
            if pid is not None and self.processes[rank].is_alive():
                os.kill(pid, number)

    def is_alive(self) -> bool:
        return any(process.is_alive() for process in self.processes)

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        """Returns when the condition holds; the job must not end before."""
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            alive = self.is_alive()
            assert alive or condition(), f"the job ended before {what}:\n{self.log}"
            assert time.monotonic() < deadline_s, f"no {what} in {WAIT_S} s:\n{self.log}"
            time.sleep(0.002)

    def wait_for_log(self, text: str) -> None:
        self.wait_for(lambda: text in self.log, f"{text!r} in its log")

    def end(self) -> None:
        """Kills what is left of the job."""
        self.send(signal.SIGKILL)
        for process in self.processes:
            process.join()


def start(
    argv: list[str],
    log: Path,
    num_ranks: int = 1,
    *,
    env: Callable[[int], dict[str, str]] | None = None,
    hook: Hook | None = None,
    absent: tuple[int, ...] = (),
    simulated: bool = False,
) -> Job:
    """The trainer under way on so many ranks, with the small settings and then argv.

    env(rank) is given instead of torchrun's variables; ranks that are absent never start. With
    `simulated` the process that they are forked from has the make-believe CUDA (tests/gpu_sim).
    """
    port = find_free_port()
    processes = []
    arch = [] if simulated else ["-a", ARCH]
    for rank in range(num_ranks):
        if rank in absent:
            continue
        launch = env(rank) if env else rank_variables(rank, num_ranks, port)
        variables = plain_environment() | launch
        args = (variables, [*SMALL, *arch, *argv], log, hook)
        processes.append(_CONTEXT.Process(target=_be_rank, args=args))
    return _start_all(processes, log, simulated)


def run(argv: list[str], log: Path, num_ranks: int = 1, **options: object) -> Job:
    """The trainer from start to end."""
    job = start(argv, log, num_ranks, **options)  # type: ignore[arg-type]
    job.wait()
    return job


def call(
    function: Hook,
    log: Path,
    num_ranks: int = 1,
    *,
    env: Mapping[str, str] | None = None,
    simulated: bool = False,
) -> Job:
    """A function under way on so many ranks in place of the trainer, with more variables."""
    port = find_free_port()
    processes = []
    for rank in range(num_ranks):
        variables = plain_environment() | rank_variables(rank, num_ranks, port) | dict(env or {})
        processes.append(_CONTEXT.Process(target=_be_called, args=(variables, log, function)))
    return _start_all(processes, log, simulated)


def end_leftovers() -> None:
    """Kills what a failed test left running."""
    while _jobs:
        _jobs.pop().end()


def rank_variables(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """What torchrun exports; none for a single rank, which is started as plain python."""
    if num_ranks == 1:
        return {}
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port}
    sizes = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    return {k: str(v) for k, v in (numbers | sizes).items()} | {"MASTER_ADDR": "127.0.0.1"}


def plain_environment() -> dict[str, str]:
    """This environment without the variables of launchers and schedulers."""
    return {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS) and k not in RANKS}


def find_free_port() -> int:
    """A port for a rendezvous: no outgoing connection gets one of these, nor does another worker.

    One that the kernel chooses for us, as for a connection, may be given to such a connection
    between this moment and the start of rank 0.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = FIRST_PORT + worker % 4 * PORTS_OF_A_WORKER
    for number in _port_numbers:
        port = first + number % PORTS_OF_A_WORKER
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("0.0.0.0", port))
            return port
    raise AssertionError("the numbers do not end")


def _start_all(processes: list[ForkServerProcess], log: Path, simulated: bool) -> Job:
    job = Job(processes, log)
    _jobs.append(job)
    # The standard library knows one server a process; we have two.
    connect = _server(simulated).connect_to_new_process
    with mock.patch.object(forkserver, "connect_to_new_process", connect):
        for process in processes:
            process.start()
    return job


@functools.cache
def _server(simulated: bool) -> forkserver.ForkServer:
    """The process that ranks are forked from."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload(["tests.train.preload"])
    # It reads these before it imports torch: a fork must not meet other threads.
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    variables = dict.fromkeys(names, "1") | (simulated_environment() if simulated else {})
    with mock.patch.dict(os.environ, variables):
        server.ensure_running()
    return server


def _be_rank(env: dict[str, str], argv: list[str], log: Path, hook: Hook | None) -> None:
    def train() -> None:
        from dataset.errors import run_command
        from train.__main__ import main

        if hook is not None:
            hook()
        sys.argv = ["train", *argv]
        code = run_command(main)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    _be_called(env, log, train)


def _be_called(env: dict[str, str], log: Path, function: Hook) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.environ.clear()
    os.environ.update(env)
    try:
        function()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)
