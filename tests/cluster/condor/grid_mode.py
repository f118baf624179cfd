"""Jobs of condor/train.sub on the pool of the tests, and a look into their sandboxes."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from tests.cluster.condor.jobs import PATIENCE_S, Job

ROOT = Path(__file__).resolve().parents[3]
TINY = "-a resnet18 -b 4 --image-size 32 -j 0 -p 1"
SLOW = "-a resnet18 -b 16 --image-size 64 -j 0 -p 1"  # some tenths of a second a step
# In place of PYTHON: the first STARTS starts of the trainer in a sandbox checkpoint at once.
EAGER = """#!/bin/bash
if [[ "$*" == "-m train "* ]]; then
    echo start >>starts
    if (( $(wc -l <starts) <= {starts} )); then set -- "$@" --checkpoint-minutes 0.0001; fi
fi
exec {python} "$@"
"""
T = TypeVar("T")


def submit_training(
    condor: ModuleType,
    append: str = "",
    files: Mapping[str, str | bytes] | None = None,
    **macros: str,
) -> Job:
    """Submits condor/train.sub with macros that suit this machine; `append` as condor_submit's."""
    folder: Path = condor.make_folder(files or {})
    values = {
        "DATA": "dummy",
        "DATA_GB": "1",
        "CPUS": "1",
        "MEMORY_GB": "2",
        "ALLOW_CPU": "1",
        "EPOCHS": "1",
        "PYTHON": str(condor.PYTHON),
        "TRAIN": f"{TINY} --max-steps 2",
    } | {name: value.replace("FOLDER", str(folder)) for name, value in macros.items()}
    words = shlex.join(f"{name}={value}" for name, value in values.items())
    words += "".join(f" -append {shlex.quote(line)}" for line in append.splitlines())
    job: Job = condor.submit_file(folder, str(ROOT / "condor/train.sub"), words, log="grid.log")
    return job


def eager_python(condor: ModuleType, num_starts: int) -> str:
    """The text of a PYTHON whose first trainings of a sandbox exit with 85 after one step."""
    return EAGER.format(python=condor.PYTHON, starts=num_starts)


def result_folder(job: Job) -> Path:
    return job.folder / "results" / f"{job.cluster}.0"


def read_result(job: Job) -> dict[str, Any]:
    """The run.json that came back."""
    record: dict[str, Any] = json.loads((result_folder(job) / "run.json").read_text())
    return record


def read_output(job: Job) -> str:
    """What the job said in all its starts."""
    return (job.folder / f"results.{job.cluster}.0.out").read_text()


def read_errors(job: Job) -> str:
    return (job.folder / f"results.{job.cluster}.0.err").read_text()


def find_sandbox(condor: ModuleType, job: Job) -> Path | None:
    """Where a job runs, or ran last, as seen from outside the pool; None before its start."""
    starts = [event for event in job.events() if event.type.name == "EXECUTE"]
    if not starts:
        return None
    sandbox = str(starts[-1]["ExecuteProps"]["CondorScratchDir"]).lstrip("/")
    return Path(condor.ROOT / sandbox)


def peek_output(condor: ModuleType, job: Job) -> str:
    """What a running job has said so far in its sandbox."""
    sandbox = find_sandbox(condor, job)
    try:
        return (sandbox / "_condor_stdout").read_text() if sandbox else ""
    except OSError:  # it has left that sandbox
        return ""


def is_over(job: Job) -> bool:
    """Whether a job has ended or is on hold: it will say nothing more."""
    names = [event.type.name for event in job.events()]
    return "JOB_TERMINATED" in names or names.count("JOB_HELD") > names.count("JOB_RELEASED")


def wait_until(look: Callable[[], T], what: str, timeout_s: float = PATIENCE_S) -> T:
    """The first true answer; a job may wait long for one of the two GPUs."""
    deadline_s = time.monotonic() + timeout_s
    while not (answer := look()):
        assert time.monotonic() < deadline_s, f"no {what} within {timeout_s} s"
        time.sleep(0.1)
    return answer


def wait_for_step(condor: ModuleType, job: Job, after: str = "step") -> None:
    """Returns once the trainer has made a third step after it said `after`."""

    def look() -> bool:
        said = peek_output(condor, job).partition(after)[2]
        if len(re.findall(r" step \d+/", said)) >= 3:
            return True
        assert not is_over(job), f"job {job.cluster} was over before its third step:\n{said}"
        return False

    wait_until(look, f"third step of job {job.cluster} after {after!r}")


def kill_starter(condor: ModuleType, job: Job) -> None:
    """Kills the starter of a running job, as when a pilot dies: no signal reaches the job."""
    start = [event for event in job.events() if event.type.name == "EXECUTE"][-1]
    slot = str(start["SlotName"]).partition("@")[0]
    (pid,) = condor.find_processes("condor_starter", slot=slot)
    os.kill(pid, 9)
