"""Instance 9 of a service, used from other processes, so that nobody's own service is disturbed."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INSTANCE = "9"


@dataclass(frozen=True)
class SpareInstance:
    """A service by its name: what tests of its start and its end command."""

    service: str

    @property
    def folder(self) -> Path:
        """Where it keeps its files while it runs."""
        return Path(tempfile.gettempdir()) / f"trainyard-{self.service}-{INSTANCE}"

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Free at the start and at the end, for one test at a time on this machine."""
        with open(f"{self.folder}.test", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.run("service.down()")  # an aborted run may have left it
            yield
            self.run("service.down()")

    def run(self, program: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """How a program ended that knows the module of the service as `service`."""
        text = f"from tests.cluster.{self.service} import service\n{program}"
        ours = ("PYTEST_VERSION", "PYTEST_XDIST_WORKER")
        clean = {k: v for k, v in os.environ.items() if k not in ours}
        environment = {**clean, "TRAINYARD_INSTANCE": INSTANCE, **environment}
        command = [sys.executable, "-c", text]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
