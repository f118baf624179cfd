"""Ends a search as a SIGKILL or a machine's end does, and says what is left of it."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from report.search.trials import TRIAL_FILE, Trial
from scripts.trials.search_file import read_search
from scripts.trials.store import Store, read_trials
from tests.scripts.trials.searches import find_disagreements


def kill_jobs(search: Path) -> None:
    """SIGKILL for submitit's processes of all jobs of a search, known to it or not."""
    for pid in list(find_controllers(search)):
        with suppress(FileNotFoundError, ProcessLookupError):  # it came to its end just now
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            for each in (pid, *children):
                os.kill(int(each), signal.SIGKILL)


def find_controllers(search: Path) -> Iterator[str]:
    """The process ids of submitit's controllers whose logs lie in a search."""
    logs = os.fsencode(search / "logs") + b"/"
    for path in Path("/proc").iterdir():
        with suppress(OSError):
            words = (path / "cmdline").read_bytes().split(b"\0") if path.name.isdigit() else []
            if b"submitit.local._local" in words and any(w.startswith(logs) for w in words):
                yield path.name


def take_stock(search: Path, before: Mapping[int, Trial], scratch: Path) -> dict[int, Trial]:
    """The trials that a resume finds now, after what it does first, in a copy of the search.

    Its journal and its folders agree; no trial is lost, drawn anew, or touched after its end.
    """
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    for path in search.iterdir():
        if path.is_file() and path.name != ".lock":
            shutil.copy2(path, scratch)
        elif (path / TRIAL_FILE).exists():
            (scratch / path.name).mkdir()
            shutil.copy2(path / TRIAL_FILE, scratch / path.name)
    plan = read_search(search)
    Store(scratch, plan, is_sole=True)
    assert find_disagreements(scratch, plan, goes_on=True) == []
    now = read_trials(scratch)
    assert sorted(now) == list(range(len(now)))
    for number, trial in before.items():
        assert now[number] == trial if trial.is_over else now[number].params == trial.params
    return now
