"""Keeps the fetcher of a node alive: started, watched, started again, ended."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dataset.errors import BAD_DATA, DONE, TRY_AGAIN, USER_MISTAKE
from dataset.redaction import printable, redact
from dataset.stream.arrivals import ArrivalMap, State
from dataset.stream.spec import read_spec

log = logging.getLogger("trainyard.fetch")

SILENT_S = 10.0  # a fetcher that has not been heard of for so long is stopped or hangs
START_S = 60.0  # until it is first heard of: a cold shared disk is slow to import from
MAX_RESTARTS = 3  # in a row
PROGRESS_CHUNKS = 8  # a start that brought so many MiB ends the row
POLL_S = 0.05
END_S = 2.0  # for a SIGTERM to end it
_ROOT = Path(__file__).resolve().parents[2]
_ANSWERS = (USER_MISTAKE, BAD_DATA, TRY_AGAIN)  # it has said why; another start would say the same


class Keeper:
    """The fetcher of one task; if it cannot be kept alive, its maps fail (75)."""

    def __init__(
        self, spec_path: Path, maps: Sequence[ArrivalMap], silent_s: float = SILENT_S
    ) -> None:
        self.num_restarts = 0
        self._spec_path, self._maps, self._silent_s = spec_path, list(maps), silent_s
        self._name = printable(redact(read_spec(spec_path).train.url))
        self._is_stopping = threading.Event()
        self._owner = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        # All starts are from one thread that outlives them: a parent's death is that of its thread.
        self._thread = threading.Thread(target=self._keep, name="keeper", daemon=True)

    def start(self) -> None:
        """Starts the fetcher, and a thread that watches it."""
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Ends the fetcher; what has arrived is kept. May be called again, and by anyone."""
        if os.getpid() != self._owner or not self._thread.ident:
            return  # a forked child, or never started
        self._is_stopping.set()
        self._thread.join(2 * END_S)
        atexit.unregister(self.stop)

    def kill(self) -> None:
        """Ends the fetcher at once and waits for nothing, in a process that is about to end."""
        self._is_stopping.set()
        if self._process is not None:
            self._process.kill()

    def _keep(self) -> None:
        try:
            self._keep_alive()
        except OSError as error:  # no memory for another process, perhaps
            self._fail(TRY_AGAIN, f"the fetcher of {self._name} cannot be started ({error})")

    def _keep_alive(self) -> None:
        num_in_row = 0
        while not self._is_stopping.is_set():
            num_before = self._count_here()
            end = self._run_once()
            if self._is_stopping.is_set() or self._is_answer(end):
                return
            num_in_row += 1
            if self._count_here() >= num_before + PROGRESS_CHUNKS:
                num_in_row = 0
            if num_in_row > MAX_RESTARTS:
                last = f"the last one {end}"
                self._fail(
                    TRY_AGAIN, f"the fetcher of {self._name} died {num_in_row} times; {last}"
                )
                return
            log.warning("the fetcher %s; starting it again", end)
            self.num_restarts += 1

    def _count_here(self) -> int:
        return sum(arrivals.progress for arrivals in self._maps)

    def _run_once(self) -> str | int:
        """One start of the fetcher to its end: its exit code, or in words how it died."""
        process = self._process = self._start()
        started_s = time.monotonic()
        try:
            while process.poll() is None:
                if self._is_stopping.wait(POLL_S):
                    return DONE
                silent_s = min(arrivals.silent_s for arrivals in self._maps)
                is_heard = any(arrivals.pid == process.pid for arrivals in self._maps)
                limit_s = self._silent_s if is_heard else max(START_S, self._silent_s)
                if min(silent_s, time.monotonic() - started_s) >= limit_s:
                    return f"was silent for {limit_s:.0f} s"
        finally:
            _end(process, is_kind=self._is_stopping.is_set())
        code = process.returncode
        if code in (DONE, *_ANSWERS):
            return code
        return f"was killed by signal {-code}" if code < 0 else f"crashed (exit {code})"

    def _start(self) -> subprocess.Popen[bytes]:
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONSAFEPATH": "1",  # not the modules that may lie in the current folder
        }
        command = [sys.executable, "-m", "dataset.stream.fetcher", str(self._spec_path)]
        return subprocess.Popen(
            [*command, "--parent", str(os.getpid())],
            env=environ,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C is the trainer's to handle
        )

    def _is_answer(self, end: str | int) -> bool:
        """Whether the fetcher itself has ended the stream; marks what it could not mark."""
        if isinstance(end, str):
            return False
        if end != DONE:
            self._fail(end, f"the fetcher ended with exit code {end}; its messages say why")
        return True

    def _fail(self, code: int, text: str) -> None:
        kept = "what has arrived is kept: run the same command again"
        for arrivals in self._maps:
            if arrivals.state is State.COMING:
                arrivals.fail(code, f"{text}; {kept}")


def _end(process: subprocess.Popen[bytes], is_kind: bool) -> None:
    """Ends a process if it lives: with time to end by itself, or at once."""
    if is_kind:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    process.kill()
    process.wait()
