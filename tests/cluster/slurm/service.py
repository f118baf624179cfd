"""Installs, starts and stops a real SLURM: munged, slurmctld and four slurmd, all on loopback.

All its files lie in one folder, apart from the device files of the fake GPUs; down() removes both.
It has its own munge key and socket, so that it leaves alone a SLURM which this machine belongs to.
The names of the nodes (n1 to n4) are SLURM's alone, as on sites whose node names no DNS knows.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
from pathlib import Path

from tests.cluster.lifetime import (
    Lifetime,
    apt_install,
    await_apt_install,
    end_processes,
    why_not_root_and_apt,
)
from tests.cluster.ports import reserve_ports, wait_until_free
from tests.cluster.slurm.jobs import Job, clean_env, run, sbatch, srun, wait_until
from tests.cluster.slurm.layout import (
    CONF,
    CONTROLLER_PORT,
    DEVICES,
    FIRST_NODE_PORT,
    GRES_CONF,
    HOME,
    MUNGE_KEY,
    MUNGE_SOCKET,
    NODES,
    SLURM_CONF,
)
from tests.cluster.slurm.processes import find_processes

__all__ = ["NODES", "Job", "clean_env", "down", "how_to_use", "is_up", "missing", "run", "sbatch",
           "srun", "up", "wait_until"]  # fmt: skip

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
START_S = 120.0


def missing() -> str | None:
    """Why SLURM cannot run on this machine, or None."""
    return None if os.geteuid() == 0 and _is_installed() else why_not_root_and_apt()


def is_up() -> bool:
    """Whether it answers and all nodes take jobs; a killed test run's does not count."""
    return CONF.exists() and not _lifetime.is_abandoned() and _answers()


def up() -> None:
    """Installs SLURM when needed and starts it, after clearing what a crash left."""
    with _lifetime.exclusive():
        started = not is_up()
        if started:
            _clear()
            _install()
            node_ports = range(FIRST_NODE_PORT, FIRST_NODE_PORT + len(NODES))
            reserve_ports(CONTROLLER_PORT, node_ports[-1])
            for port in (CONTROLLER_PORT, *node_ports):
                wait_until_free(port)
            _write_files()
            _start_daemons()
        _lifetime.join(started)


def down() -> None:
    """Ends all jobs and daemons and removes what was made; fine when it is down."""
    with _lifetime.exclusive():
        if _lifetime.leave():
            _clear()


def how_to_use() -> str:
    """What a person types to use it."""
    return (
        f"  export SLURM_CONF={CONF}\n"
        "  srun --nodes=4 --ntasks=4 hostname\n"
        "  sbatch --nodes=2 --ntasks-per-node=2 slurm/train.sbatch --dummy --device cpu"
    )


def files_of_people() -> Path | None:
    """Nothing: jobs write into the folders from which they were submitted."""
    return None


def _is_installed() -> bool:
    return all(shutil.which(program) for program in PROGRAMS)


def _install() -> None:
    await_apt_install()
    if not _is_installed():
        apt_install(*PACKAGES)


def _listens() -> bool:
    """Whether the controller is there; SLURM's own commands are slow to notice that it is not."""
    try:
        socket.create_connection(("127.0.0.1", CONTROLLER_PORT), timeout=5).close()
    except OSError:
        return False
    return True


def _answers() -> bool:
    if not _listens():
        return False
    try:
        done = run("sinfo", "--noheader", "--Node", "--format=%N %T", timeout_s=10)
    except (subprocess.TimeoutExpired, FileNotFoundError):
        return False
    states = dict(line.split() for line in done.stdout.splitlines())
    return set(states) == set(NODES) and set(states.values()) <= {"idle", "mixed", "allocated"}


def _write_files() -> None:
    for folder in (HOME, HOME / "state", *(HOME / f"spool-{node}" for node in NODES)):
        folder.mkdir(mode=0o755)
    MUNGE_KEY.touch(mode=0o600)
    MUNGE_KEY.write_bytes(os.urandom(128))
    (HOME / "gres.conf").write_text(GRES_CONF)
    CONF.write_text(SLURM_CONF)
    for device in DEVICES:  # the numbers of /dev/null: SLURM opens the files, and no more
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))


def _start_daemons() -> None:
    _start("munged", "--force", f"--socket={MUNGE_SOCKET}", f"--key-file={MUNGE_KEY}",
           f"--pid-file={HOME}/munged.pid", f"--log-file={HOME}/munged.log",
           f"--seed-file={HOME}/munged.seed", "--num-threads=4")  # fmt: skip
    _start("slurmctld", "-c")
    for node in NODES:
        _start("slurmd", "-N", node)
    try:
        wait_until(_answers, "all nodes take jobs", START_S)
    except TimeoutError as error:
        raise TimeoutError(f"{error}\n{_tail_logs()}") from None


def _start(program: str, *args: str) -> None:
    """Starts a daemon, which detaches itself, with nothing of the caller's environment."""
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    env = {"PATH": path, "SLURM_CONF": str(CONF), "LANG": "C.UTF-8"}
    done = subprocess.run(
        [shutil.which(program, path=path) or program, *args],
        env=env,
        cwd=HOME,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{program} {' '.join(args)} did not start: {done.stderr}{done.stdout}")


def _clear() -> None:
    """Removes every process, device and file of this SLURM, also those that a crash left."""
    if CONF.exists() and _listens():
        _cancel_jobs()
    end_processes(find_processes, patience_s=3.0)
    for device in DEVICES:
        device.unlink(missing_ok=True)
    shutil.rmtree(HOME, ignore_errors=True)


def _cancel_jobs() -> None:
    """Lets SLURM itself end its jobs; what takes long is ended with the daemons."""
    try:
        if ids := run("squeue", "--noheader", "--format=%A", timeout_s=10).stdout.split():
            run("scancel", *ids, timeout_s=10)
            wait_until(
                lambda: not run("squeue", "--noheader", timeout_s=10).stdout, "no job is left", 3.0
            )
    except (subprocess.TimeoutExpired, TimeoutError):
        return


def _tail_logs() -> str:
    logs = sorted(HOME.glob("*.log"))
    tails = [f"--- {log.name}\n" + "\n".join(log.read_text().splitlines()[-8:]) for log in logs]
    return "\n".join(tails)


_lifetime = Lifetime(HOME, _clear)
