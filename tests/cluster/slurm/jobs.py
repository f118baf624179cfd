"""The client side of the real SLURM: srun and sbatch with time limits, and jobs to wait for."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.slurm.layout import CONF

# A limit for what hangs, not for what a busy machine makes slow.
PATIENCE_S = 300.0
# A job of these states has ended; COMPLETING counts as running, its exit code is not final.
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE"}
# What a launcher above us (a person's own job, torchrun) may have set must not leak into a job.
_LEAKS = ("SLURM_", "SBATCH_", "SRUN_", "OMPI_", "PMIX_", "SUBMITIT_", "_CONDOR_", "TORCHELASTIC_")
_LEAKING = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def clean_env(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment as a login shell of the test cluster would have it, plus extra."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_LEAKS) and name not in _LEAKING
    }
    return env | {"SLURM_CONF": str(CONF)} | dict(extra or {})


def run(
    *command: str | Path,
    timeout_s: float = PATIENCE_S,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """A finished command; one that is too slow gets SIGTERM, so that srun ends its job too."""
    process = subprocess.Popen(
        [str(word) for word in command],
        env=clean_env(env), cwd=cwd, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=timeout_s)
    except BaseException:  # also when pytest's own time-out or a Ctrl-C comes in between
        process.terminate()
        try:
            process.communicate(timeout=150)  # srun waits for its tasks, which have KillWait
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def srun(
    *args: str | Path,
    timeout_s: float = PATIENCE_S,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """A finished srun. SLURM's own limit stands behind ours, should srun be killed."""
    limit = f"--time={int(timeout_s // 60) + 1}"
    return run("srun", limit, *args, timeout_s=timeout_s, env=env, cwd=cwd)


def sbatch(*args: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Job:
    """A submitted job; wait for it with Job.wait()."""
    done = run("sbatch", "--parsable", *args, env=env, cwd=cwd)
    if done.returncode != 0:
        raise RuntimeError(f"sbatch refused {args}: {done.stderr.strip()}")
    return Job(done.stdout.strip())


def wait_until(is_true: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Returns when the condition holds; SLURM has no event to wait for, so it polls."""
    deadline_s = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"after {timeout_s:.0f} s still not so: {what}")
        time.sleep(0.1)


def _tell(*command: str) -> None:
    """A command of the test that SLURM has to accept."""
    done = run(*command)
    assert done.returncode == 0, (command, done.stderr)


@dataclass(frozen=True)
class Job:
    """One job of the test cluster, by its id (of an array: 12_3)."""

    id: str

    def show(self) -> dict[str, str]:
        """What scontrol says about the job now; a busy controller is asked again."""
        found: dict[str, str] = {}

        def is_told() -> bool:
            done = run("scontrol", "show", "job", "--oneliner", self.id)
            found.update(re.findall(r"(\S+?)=(\S*)", done.stdout))
            return bool(found)

        wait_until(is_told, f"SLURM tells of job {self.id}")
        return found

    def state(self) -> str:
        return self.show()["JobState"]

    def wait(self, timeout_s: float = PATIENCE_S) -> dict[str, str]:
        """What scontrol says once the job has ended; a job that does not end is cancelled."""
        return self.wait_for(ENDED, timeout_s)

    def wait_for(self, states: set[str], timeout_s: float = PATIENCE_S) -> dict[str, str]:
        """What scontrol says once the job is in one of these states."""
        try:
            wait_until(lambda: self.state() in states, f"job {self.id} is {states}", timeout_s)
        except TimeoutError as error:
            shown = self.show()
            self.cancel()
            raise TimeoutError(f"{error}; it is {shown}; it wrote:\n{self.output()}") from None
        return self.show()

    def await_restart(self, timeout_s: float = PATIENCE_S) -> None:
        """Returns when a requeued job runs again; SLURM is told not to hold it back for long.

        But in a later second than that of the requeue: slurmd takes a credential of the same second
        for the one that was revoked, and starts nothing.
        """
        pending_since_s: float | None = None

        def has_restarted() -> bool:
            nonlocal pending_since_s
            shown = self.show()
            if shown["JobState"] == "PENDING":
                pending_since_s = pending_since_s or time.monotonic()
                if time.monotonic() > pending_since_s + 2:
                    run("scontrol", "update", f"JobId={self.id}", "StartTime=now")
            # Not COMPLETING: a requeued job is that until its old tasks are gone.
            return shown["Restarts"] != "0" and shown["JobState"] in {"RUNNING", *ENDED}

        wait_until(has_restarted, f"job {self.id} runs again", timeout_s)

    def signal(self, name: str) -> None:
        """Sends a signal to the tasks of the job's steps."""
        _tell("scancel", f"--signal={name}", self.id)

    def limit_minutes(self, minutes: int) -> None:
        """Moves the end of the job to this many minutes from now, or up to one minute less."""
        hours, full, _ = self.show()["RunTime"].split(":")
        limit = 60 * int(hours) + int(full) + minutes
        _tell("scontrol", "update", f"JobId={self.id}", f"TimeLimit={limit}")

    def cancel(self) -> None:
        run("scancel", self.id)

    def requeue_held(self) -> None:
        """Puts a running job back into the queue, where it stays until release()."""
        _tell("scontrol", "requeuehold", self.id)

    def release(self) -> None:
        _tell("scontrol", "release", self.id)

    def requeue(self) -> None:
        _tell("scontrol", "requeue", self.id)

    def output(self) -> str:
        """What the job wrote until now."""
        path = Path(self.show()["StdOut"])
        return path.read_text() if path.exists() else ""
