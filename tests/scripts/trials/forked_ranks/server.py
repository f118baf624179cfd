"""Forks the ranks of submitit's jobs from a process that has torch already.

Everything else of a job is real: submitit's controller, its pickled task, the logs, the process
that the controller started and watches (sitecustomize.py). Importing torch in each rank would take
a search of twelve trials a minute.
"""

from __future__ import annotations

import json
import os
import select
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.scripts.trials.forked_ranks.sitecustomize import PORT
from tests.scripts.trials.pauses import wait_at_pauses
from tests.train import started_ranks as ranks


@dataclass(frozen=True)
class _Task:
    """What a rank does, as submitit.core._submit does it; it waits at the pauses of the test."""

    folder: str
    here: str
    env: dict[str, str]

    def __call__(self) -> None:
        os.environ.clear()
        os.environ.update(self.env)
        os.chdir(self.here)
        wait_at_pauses()
        from submitit.core.submission import process_job

        process_job(self.folder)


def train_at(here: Path, argv: list[str]) -> None:
    """`python -m train ARGV` in a folder, and the end of this process."""
    os.chdir(here)
    from dataset.errors import run_command
    from train.run import main

    os._exit(run_command(lambda: main(argv)))


class RankServer:
    """The ranks that run; the test calls `serve` while it waits for something."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ranks: dict[socket.socket, ranks.Job] = {}
        self._logs: dict[socket.socket, Path] = {}
        self.doubles: list[Path] = []  # logs of ranks that began while their trial had another

    @property
    def variables(self) -> dict[str, str]:
        """What the environment of a search needs, for its trials to ask here."""
        port = self._listener.getsockname()[1]
        return {"PYTHONPATH": str(Path(__file__).parent), PORT: str(port)}

    def serve(self, timeout_s: float = 0.005) -> None:
        """Starts what was asked for, tells of what has ended, and ends what nobody waits for."""
        ready, _, _ = select.select([self._listener, *self._ranks], [], [], timeout_s)
        for connection in ready:
            if connection is self._listener:
                self._start(self._listener.accept()[0])
            else:  # the process that waits for this rank was killed
                self._ranks[connection].end()
        for connection, rank in list(self._ranks.items()):
            if not rank.is_alive():
                with suppress(OSError):
                    connection.sendall(b"%d\n" % rank.wait()[0])
                self._forget(connection)

    def _start(self, connection: socket.socket) -> None:
        line = connection.makefile().readline()
        if not line:
            connection.close()
            return
        request = json.loads(line)
        log = Path(request["log"])
        self.doubles += [log for other in self._logs.values() if other.parent == log.parent]
        task = _Task(request["folder"], request["here"], request["env"])
        rank = ranks.call(task, log)
        self._ranks[connection], self._logs[connection] = rank, log
        connection.sendall(b"%d\n" % (rank.processes[0].pid or 0))

    def end_all(self) -> None:
        """SIGKILL for all ranks, and nothing for those that were asked for and not started."""
        for connection, rank in list(self._ranks.items()):
            rank.end()
            self._forget(connection)
        while select.select([self._listener], [], [], 0)[0]:
            self._listener.accept()[0].close()

    def close(self) -> None:
        self.end_all()
        self._listener.close()

    def _forget(self, connection: socket.socket) -> None:
        del self._ranks[connection], self._logs[connection]
        connection.close()
