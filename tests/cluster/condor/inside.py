"""The first process of the pool's namespaces: mounts what the pool sees, then runs condor_master.

Started by service.py as `unshare ... python inside.py CACHED_ROOT ROOT PATH...`. It is process 1 in
there: when it dies, the kernel ends every process of the pool and drops every mount with it.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path


def mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True)


def show(path: Path, root: Path) -> None:
    """Lets the pool see a file or folder of the host at the same path, read-only."""
    target = root / path.relative_to("/")
    if path.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    mount("--bind", path, target)
    mount("-o", "remount,bind,ro", target)


def assemble(cached: Path, root: Path, image: Path, shown: list[Path], shared: Path) -> None:
    """Mounts everything below `root`."""
    # The starter's own mount calls fail with EINVAL when its / is no mount point.
    mount("--bind", root, root)
    mount("--bind", cached / "usr", root / "usr")
    for path in shown:
        show(path, root)
    mount("-o", "remount,bind,ro", root / "usr")
    (root / shared.relative_to("/")).mkdir(parents=True, exist_ok=True)
    mount("--bind", shared, root / shared.relative_to("/"))
    (root / image.relative_to("/")).mkdir()
    mount("--bind", "-o", "ro", cached, root / image.relative_to("/"))
    mount("-t", "proc", "proc", root / "proc")
    # A sysfs of its own has no cgroups below it, in which HTCondor would leave folders on the host.
    mount("-t", "sysfs", "-o", "ro", "sysfs", root / "sys")
    mount("--bind", "/dev", root / "dev")
    mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", root / "dev/shm")
    mount("-t", "devpts", "-o", "ptmxmode=666", "devpts", root / "dev/pts")  # apptainer asks for it


def enter(root: Path) -> None:
    """Makes root our /: of the whole namespace, since apptainer does not run in a chroot."""
    (root / "old").mkdir(exist_ok=True)
    pivoted = subprocess.run(["pivot_root", root, root / "old"]).returncode == 0
    if not pivoted:  # where / is an initramfs: all but container jobs run in a chroot, too
        os.chroot(root)
    os.chdir("/")
    if pivoted:
        subprocess.run(["/usr/bin/umount", "--lazy", "/old"], check=True)
    Path("/old").rmdir()


def main() -> None:
    cached, root, image, shared, *shown = map(Path, sys.argv[1:])
    users = os.open(f"{cached}.users", os.O_WRONLY | os.O_CREAT, 0o644)
    fcntl.flock(users, fcntl.LOCK_SH)  # held to our end: this root is in use
    subprocess.run(["hostname", "pool"], check=True)
    assemble(cached, root, image, shown, shared)
    enter(root)
    subprocess.run(["/usr/sbin/ldconfig"], check=True)  # a Python in /usr/local brings libraries
    path = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}
    master = subprocess.Popen(["/usr/sbin/condor_master", "-f"], env={**os.environ, **path})
    while os.waitpid(-1, 0)[0] != master.pid:  # orphans of jobs come to process 1
        pass


if __name__ == "__main__":
    main()
