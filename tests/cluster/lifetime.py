"""Who uses a service: file locks that outlive crashes, and the processes that it left behind.

A service that a test run started belongs to the test runs that hold its `users` lock. The kernel
drops that lock with the process, so a killed run leaves an *abandoned* service, which the next
start clears. A service that a person started (`make cluster-up`) stays until `make cluster-down`.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

MARK = "TRAINYARD_SERVICE"  # in the environment of every process that a service starts


def instance() -> int:
    """The number of this set of services; another one has its own ports and folders beside it.

    Each worker of pytest-xdist has a set of its own, so that none meets the faults of another's.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    return int(os.environ.get("TRAINYARD_INSTANCE", "0")) + int(worker)


def state_folder(service: str) -> Path:
    """Where a running service keeps its files (short: Unix sockets have 108 characters)."""
    suffix = f"-{instance()}" if instance() else ""
    return Path(tempfile.gettempdir()) / f"trainyard-{service}{suffix}"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock file, one process at a time; the file goes with the last one that held it."""
    while True:
        with open(path, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # The holder before us removed the file: what we hold is then no longer the lock.
            try:
                if not os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                    continue
            except FileNotFoundError:
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


@dataclass
class Lifetime:
    """The locks of one service; `stop` is what ends it for good."""

    folder: Path
    stop: Callable[[], None]
    _users_fd: int | None = field(default=None, init=False)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Holds the lock under which a service is started or stopped, one process at a time."""
        with locked(Path(f"{self.folder}.lock")):
            yield

    def is_abandoned(self) -> bool:
        """Whether a test run started the service and no test run is left that uses it."""
        return self.is_of_tests() and not self._has_users()

    def is_of_tests(self) -> bool:
        """Whether a test run started the service, and not a person."""
        return (self.folder / "started-by-tests").exists()

    def join(self, started: bool) -> None:
        """Makes this test run a user of the service until it leaves or dies."""
        if "PYTEST_VERSION" not in os.environ:
            return
        if started:
            (self.folder / "started-by-tests").touch()
        if self._users_fd is None:
            self._users_fd = os.open(self._users_file, os.O_WRONLY | os.O_CREAT, 0o644)
            fcntl.flock(self._users_fd, fcntl.LOCK_SH)  # held until we leave
            atexit.register(self._leave_at_exit)

    def leave(self) -> bool:
        """Whether the caller was the last user; else the last one to leave stops the service."""
        if self._users_fd is not None:
            os.close(self._users_fd)
            self._users_fd = None
        if self.folder.exists() and self._has_users():
            (self.folder / "stop-wanted").touch()
            return False
        self._users_file.unlink(missing_ok=True)
        return True

    def _leave_at_exit(self) -> None:
        if self._users_fd is None:
            return
        with self.exclusive():
            os.close(self._users_fd)
            self._users_fd = None
            if (self.folder / "stop-wanted").exists() and not self._has_users():
                self.stop()
                self._users_file.unlink(missing_ok=True)

    @property
    def _users_file(self) -> Path:
        return Path(f"{self.folder}.users")

    def _has_users(self) -> bool:
        with open(self._users_file, "a") as users:
            try:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False


def find_marked(folder: Path) -> list[int]:
    """The ids of the processes that carry the service's mark in their environment."""
    return [pid for pid in _all_pids() if is_marked(pid, folder)]


def is_marked(pid: int, folder: Path) -> bool:
    """Whether a process lives and carries the service's mark in its environment."""
    return f"{MARK}={folder}".encode() in _read(pid, "environ").split(b"\0")


def find_rooted(root: Path) -> list[int]:
    """The ids of the processes whose / is the given folder."""
    found = []
    for pid in _all_pids():
        try:
            if Path(f"/proc/{pid}/root").readlink() == root:
                found.append(pid)
        except OSError:
            continue
    return found


def end_processes(find: Callable[[], list[int]], patience_s: float = 5.0) -> None:
    """Ends what `find` returns: SIGTERM, then SIGKILL; returns when all are gone."""
    deadline_s = time.monotonic() + patience_s
    sent = signal.SIGTERM
    while pids := find():
        for pid in pids:
            try:
                os.kill(pid, sent)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline_s:
            if time.monotonic() > deadline_s + 30:
                raise RuntimeError(f"processes {pids} did not end on SIGKILL")
            sent = signal.SIGKILL
        time.sleep(0.05)


def _apt_lock() -> Path:
    return Path(tempfile.gettempdir()) / "trainyard-apt.lock"


def await_apt_install() -> None:
    """Returns when no other test run installs: programs are there before they are set up."""
    with locked(_apt_lock()):
        return


def apt_install(*packages: str) -> None:
    """Installs the Debian packages that are not there yet; waits for another apt to finish."""
    query = ["dpkg-query", "-W", "-f", "${db:Status-Status}\n", *packages]
    known = subprocess.run(query, capture_output=True, text=True)
    if known.returncode == 0 and set(known.stdout.split()) == {"installed"}:
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    with locked(_apt_lock()):
        # An update that fails for one foreign source leaves usable lists: the install decides.
        subprocess.run(["apt-get", "update"], capture_output=True, env=environment)
        done = subprocess.run(
            [*install, "-o", "DPkg::Lock::Timeout=300"],
            env=environment,
            capture_output=True,
            text=True,
        )
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(install)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )


def why_not_root_and_apt() -> str | None:
    """Why packages and daemons of the system are out of reach here, or None."""
    if os.geteuid() != 0:
        return "needs root"
    return None if shutil.which("apt-get") else "needs apt (Debian)"


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it ended meanwhile
        return b""
