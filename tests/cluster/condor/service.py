"""The HTCondor pool as a service of the tests: start, stop, run commands as a user, submit jobs."""

from __future__ import annotations

import os
import platform
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from tests.cluster import lifetime
from tests.cluster.condor import pool
from tests.cluster.condor.jobs import PATIENCE_S, Job, describe
from tests.cluster.condor.layout import BIG, HOME, PORT, PROJECT, ROOT, SMALL, WORK
from tests.cluster.condor.pool import enter, find_processes, run
from tests.cluster.condor.root import USER, USER_ID, find_or_build_root

__all__ = ["BIG", "PORT", "PROJECT", "ROOT", "SMALL", "USER", "WORK", "Job",
           "find_processes", "run"]  # fmt: skip

PYTHON = PROJECT / ".venv/bin/python"  # what jobs call: the same path in the pool


def missing() -> str | None:
    """Why the pool cannot run here, or None."""
    reason = lifetime.why_not_root_and_apt()
    if reason is None and platform.freedesktop_os_release().get("ID") != "debian":
        reason = "needs Debian, whose mirror has the pool's root"
    if reason is None and subprocess.run([*pool.UNSHARE, "true"], capture_output=True).returncode:
        reason = "needs namespaces (a machine, or a privileged container)"
    return reason


def is_up() -> bool:
    """Whether the pool's daemons run and know each other."""
    return not _life.is_abandoned() and pool.answers()


def up() -> None:
    """Starts the pool, in seconds; makes its Debian root first where there is none (a minute)."""
    with _life.exclusive():
        started = not is_up()
        if not started:
            pool.check_same_project()
        else:
            pool.stop()
            cached = find_or_build_root()
            try:
                pool.start(cached)
            except BaseException:
                pool.stop()
                raise
        _life.join(started)


def down() -> None:
    """Stops the pool and removes its files; a run that still uses it does so when it ends."""
    with _life.exclusive():
        if _life.leave():
            pool.stop()


def how_to_use() -> str:
    """What a person can try."""
    return "\n".join(
        [
            f"  folder      {WORK}: where commands run and results land; the same path in the pool",
            "  try         python -m tests.cluster.condor condor_status",
            "  as the user python -m tests.cluster.condor bash",
            "  tour        docs/grid.md, section 9",
            f"  slots       {BIG} (16 CPUs, 2 simulated GPUs, divided on demand), {SMALL} (1 CPU)",
        ]
    )


def files_of_people() -> Path | None:
    """Where results and logs of a person's jobs land, which down() deletes."""
    return None if _life.is_of_tests() else WORK


def make_folder(files: Mapping[str, str | bytes | Path] | None = None) -> Path:
    """A folder of the pool's user, at the same path inside and outside, with files in it."""
    folder = WORK / secrets.token_hex(6)
    folder.mkdir()
    for name, content in (files or {}).items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            shutil.copy(content, target)
        else:
            target.write_bytes(content.encode() if isinstance(content, str) else content)
        if target.suffix in ("", ".sh", ".py"):
            target.chmod(0o755)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, USER_ID, USER_ID)
    return folder


def submit(
    text: str, files: Mapping[str, str | bytes | Path] | None = None, arguments: str = ""
) -> Job:
    """Submits a description as the pool's user, from a new folder that holds the given files.

    `log = job.log` and `queue` are added where the description has none of its own; `arguments` go
    to condor_submit (`-append`, macros such as N=3).
    """
    folder = make_folder({"job.sub": describe(text, "job.log"), **(files or {})})
    return submit_file(folder, "job.sub", arguments)


def submit_file(folder: Path, name: str, arguments: str = "", log: str = "job.log") -> Job:
    """Submits a file that lies in a folder of make_folder()."""
    answer = run(f"condor_submit {name} {arguments}", cwd=folder)
    found = re.search(r"submitted to cluster (\d+)", answer)
    if found is None:
        raise RuntimeError(f"condor_submit said:\n{answer}")
    return Job(int(found[1]), folder, folder / log, run)


def configure(text: str, timeout_s: float = PATIENCE_S) -> None:
    """Puts settings above the pool's own; returns when its daemons have them ("": none more)."""
    seen = secrets.token_hex(4)
    settings = ROOT / "etc/condor/config.d/zz-tests.conf"
    settings.write_text(f"{text}\nTRAINYARD_SETTINGS = {seen}\n")
    subprocess.run(enter("condor_reconfig", "root"), check=True, capture_output=True)
    deadline_s = time.monotonic() + timeout_s
    for daemon in ("startd", "schedd", "negotiator"):
        while seen not in run(f"condor_config_val -{daemon} TRAINYARD_SETTINGS", check=False):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the {daemon} did not read its settings in {timeout_s} s")


_life = lifetime.Lifetime(HOME, pool.stop)
