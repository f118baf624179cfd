"""The running pool: its namespaces, how commands get into them, how it starts and ends."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.cluster import lifetime, ports
from tests.cluster.condor import inside
from tests.cluster.condor.jobs import PATIENCE_S
from tests.cluster.condor.layout import (
    CONFIG,
    FIND_GPUS,
    HOME,
    IMAGE,
    PORT,
    PROJECT,
    ROOT,
    SLOW_START,
    WORK,
    python_paths,
)
from tests.cluster.condor.root import USER, USER_ID

UNSHARE = ("unshare", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child")
_SHOWN = HOME / "project"  # the clone that the jobs see
_DAEMONS = {"Collector", "Negotiator", "Scheduler", "Machine"}


def start(cached: Path) -> None:
    """Starts the pool on a cached root; returns when its daemons know each other."""
    ports.reserve_ports()
    ports.wait_until_free(PORT)
    _lay_out(cached)
    command = [*UNSHARE, sys.executable, inside.__file__, cached, ROOT, IMAGE, WORK, PROJECT]
    environment = {**os.environ, lifetime.MARK: str(HOME)}
    for name in [name for name in environment if name.startswith(("_CONDOR_", "CONDOR_"))]:
        del environment[name]
    with open(HOME / "pool.log", "wb") as log:
        process = subprocess.Popen(
            [str(word) for word in [*command, *python_paths()]],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    _wait_until_answering(process)


def _lay_out(cached: Path) -> None:
    """Makes the pool's own /: system folders of the cached root, copied where they are written."""
    ROOT.mkdir(parents=True)
    for entry in cached.iterdir():
        if entry.is_symlink():
            (ROOT / entry.name).symlink_to(entry.readlink())
        elif entry.is_dir():
            (ROOT / entry.name).mkdir(mode=0o755)
    for name in ("etc", "var", "home"):
        subprocess.run(["cp", "-a", f"{cached}/{name}/.", ROOT / name], check=True)
    (ROOT / "tmp").chmod(0o1777)
    (ROOT / "etc/hosts").write_text("127.0.0.1 pool localhost\n")
    (ROOT / "etc/hostname").write_text("pool\n")
    (ROOT / "etc/condor/config.d/99-trainyard.conf").write_text(CONFIG)
    for name, script in {"slow_start": SLOW_START, "find_gpus": FIND_GPUS}.items():
        (ROOT / "etc/condor" / name).write_text(script)
        (ROOT / "etc/condor" / name).chmod(0o755)
    owner = (ROOT / "var/log/condor").stat().st_uid
    for name in ("run/condor", "run/lock/condor", "var/spool/condor", "var/lib/condor/execute"):
        (ROOT / name).mkdir(parents=True, exist_ok=True)
        os.chown(ROOT / name, owner, owner)
    _SHOWN.write_text(str(PROJECT))
    WORK.mkdir()
    os.chown(WORK, USER_ID, USER_ID)


def _wait_until_answering(process: subprocess.Popen[bytes], patience_s: float = 120.0) -> None:
    deadline_s = time.monotonic() + patience_s
    while not answers():
        if time.monotonic() > deadline_s or process.poll() is not None:
            logs = [HOME / "pool.log", *(ROOT / "var/log/condor").glob("MasterLog")]
            ends = "\n".join(path.read_text(errors="replace")[-2000:] for path in logs)
            raise RuntimeError(f"the HTCondor pool did not start in {patience_s} s:\n{ends}")
        time.sleep(0.1)


def check_same_project() -> None:
    """Refuses the pool of another clone, whose jobs could not see this one."""
    shown = _SHOWN.read_text()
    if shown != str(PROJECT):
        raise RuntimeError(
            f"the HTCondor pool that runs here shows its jobs {shown} and not {PROJECT}; stop it "
            "there (make cluster-down), or have one of your own with TRAINYARD_INSTANCE=1"
        )


def stop() -> None:
    """Kills process 1 of the pool: the kernel ends all others and drops all mounts."""
    lifetime.end_processes(lambda: lifetime.find_marked(HOME), patience_s=0.0)
    for folder in (WORK, HOME):
        shutil.rmtree(folder, ignore_errors=True)


def answers() -> bool:
    """Whether the daemons run and both slots are known."""
    try:
        kinds = run("condor_status -any -af MyType", cwd=Path("/"), timeout_s=20).split()
    except (LookupError, RuntimeError, subprocess.TimeoutExpired):
        return False
    return set(kinds) >= _DAEMONS and kinds.count("Machine") >= 2


def run(
    command: str, cwd: Path | None = None, check: bool = True, timeout_s: float = PATIENCE_S
) -> str:
    """The output of a shell command that the pool's ordinary user runs in the pool."""
    done = subprocess.run(
        enter(f"cd {cwd or WORK} && {command}"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    if check and done.returncode != 0:
        raise RuntimeError(f"{command} failed (exit {done.returncode}):\n{done.stdout}")
    return done.stdout


def enter(command: str, user: str = USER) -> list[str]:
    """The command line that runs a shell command in the pool, as the user or as root."""
    environment = ["env", "-i", "PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"]
    environment += [f"HOME={'/root' if user == 'root' else f'/home/{user}'}", f"USER={user}"]
    pool = ["nsenter", "--target", str(_init_pid()), "--mount", "--pid", "--uts", "--ipc"]
    return [
        *pool,
        "--root",
        "--wd",
        "--",
        *["runuser", "--user", user, "--"],
        *environment,
        *["TERM=dumb", "LANG=C.UTF-8", "bash", "-c", command],
    ]


def find_processes(program: str, slot: str = "") -> list[int]:
    """The host's ids of the pool's processes of that name, such as condor_starter.

    `slot` picks the starters of one slot ("slot2", "slot1_1"), which has it in its command line.
    """
    found = [(pid, _command_line(pid)) for pid in _pool_pids()]
    named = [(pid, line) for pid, line in found if Path(line[0]).name == program]
    wanted = [pid for pid, line in named if not slot or slot in line]
    # A child that was forked and has not yet become the job looks like its parent.
    return [pid for pid in wanted if _parent(pid) not in wanted]


def _init_pid() -> int:
    """The host's id of the pool's process 1."""
    for pid in lifetime.find_marked(HOME):
        if _namespace_ids(pid)[-1:] == ["1"]:
            return pid
    raise LookupError("the HTCondor pool is down; `make cluster-up` starts it")


def _namespace_ids(pid: int) -> list[str]:
    """The ids of a process, in our namespace first, in its own last."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return []
    found = re.search(r"^NSpid:\s+(.*)$", status, re.MULTILINE)
    return found[1].split()[1:] if found else []


def _pool_pids() -> list[int]:
    """Every process in the pool's namespace, jobs (which carry no mark) included."""
    namespace = Path(f"/proc/{_init_pid()}/ns/pid").readlink()
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and Path(f"/proc/{name}/ns/pid").readlink() == namespace:
                found.append(int(name))
        except OSError:
            continue
    return found


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return [""]
