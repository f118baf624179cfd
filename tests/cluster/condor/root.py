"""The Debian 13 root with HTCondor: made once, kept in the user's cache, checked at each use."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.lifetime import apt_install

log = logging.getLogger("trainyard")

SUITE = "trixie"
USER = "grid"  # the ordinary user whose jobs run in the pool
USER_ID = 23023  # nobody's on the host
# HTCondor in a second step: named in debootstrap's --include it fails on python3-cryptography. The
# libraries are what a host's Python may link to; Debian's own python3 runs transfer plugins.
PACKAGES = (
    "htcondor python3 procps util-linux libsqlite3-0 libffi8 libbz2-1.0 liblzma5 libreadline8t64 "
    "libexpat1 libstdc++6 libgomp1 zlib1g libssl3t64"
)
# The container runtime of HTCondor's pools, which only unstable has; it needs no newer library. The
# file goes when unstable has a newer one: then, and on other processors, apt takes what is there.
APPTAINER = "pool/main/a/apptainer/apptainer_1.4.5-2_amd64.deb"
APPTAINER_SHA256 = "26cf96e08fccb0e50ea0f285a5a19f940ee873d167a0680584fe6eba7d197d65"
_PREFERENCES = (
    r"Package: *\nPin: release n=sid\nPin-Priority: -1\n\n"
    r"Package: apptainer\nPin: release n=sid\nPin-Priority: 500\n"
)
_INSTALL = f"""\
set -e
export DEBIAN_FRONTEND=noninteractive LC_ALL=C
mount -t proc proc "$ROOT/proc"
printf 'exit 101\\n' > "$ROOT/usr/sbin/policy-rc.d"
chmod +x "$ROOT/usr/sbin/policy-rc.d"
install() {{ chroot "$ROOT" apt-get install -y --no-install-recommends \
    -o Dpkg::Options::=--force-unsafe-io "$@"; }}
install {PACKAGES}
chroot "$ROOT" useradd --uid {USER_ID} --create-home --shell /bin/bash {USER}
# Unstable's own libraries stay out.
unstable() {{
    echo "deb $MIRROR sid main" >"$ROOT/etc/apt/sources.list.d/unstable.list"
    printf '{_PREFERENCES}' >"$ROOT/etc/apt/preferences"
    # The index of a mirror that is brought up to date by hand may be older than Debian allows.
    chroot "$ROOT" apt-get -o Acquire::Languages=none -o Acquire::Check-Valid-Until=false update
    install apptainer
}}
{{ chroot "$ROOT" /usr/lib/apt/apt-helper download-file "$MIRROR/{APPTAINER}" /tmp/apptainer.deb \
        SHA256:{APPTAINER_SHA256} && install /tmp/apptainer.deb; }} || unstable
rm -f "$ROOT/etc/apt/sources.list.d/unstable.list" "$ROOT/etc/apt/preferences"
rm -f "$ROOT/tmp/apptainer.deb"
chroot "$ROOT" apt-get clean
rm -rf "$ROOT"/var/lib/apt/lists/* "$ROOT"/var/cache/apt/* "$ROOT"/var/cache/debconf/*
"""


def fingerprint() -> str:
    """A name for what the recipe makes: a changed recipe is another root."""
    recipe = "\n".join([SUITE, platform.machine(), _INSTALL])
    return hashlib.sha256(recipe.encode()).hexdigest()[:12]


def cache_folder() -> Path:
    """Where roots are kept, outside the clone."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "trainyard"


def find_or_build_root() -> Path:
    """The folder of the root; builds it (a minute) when it is absent, half-made or damaged."""
    root = cache_folder() / f"condor-root-{fingerprint()}"
    root.parent.mkdir(parents=True, exist_ok=True)
    with _locked(root.parent / "condor-root.lock"):
        if not is_whole(root):
            _build(root)
            _remove_others(root)
    return root


def is_whole(root: Path) -> bool:
    """Whether the root is the one that was made, with all its files."""
    try:
        made = json.loads((root / "made.json").read_text())
    except (OSError, ValueError):
        return False
    return bool(made == _describe(root))


def find_mirror() -> str:
    """The Debian mirror that apt uses on this machine."""
    query = ["apt-get", "indextargets", "--format", "$(ORIGIN)|$(CODENAME)|$(REPO_URI)"]
    for attempt in range(2):
        answer = subprocess.run(query, capture_output=True, text=True)
        for line in answer.stdout.splitlines():
            origin, codename, uri = line.split("|", 2)
            if origin == "Debian" and "-" not in codename:
                return _resolve_mirror(uri)
        if attempt == 0:  # the lists of a fresh machine are empty
            subprocess.run(["apt-get", "update"], capture_output=True)
    raise RuntimeError("apt's sources name no Debian mirror; the pool needs a Debian host")


def _resolve_mirror(uri: str) -> str:
    """The address itself, where apt's source is a file with a list of mirrors."""
    if not uri.startswith("mirror+file:"):
        return uri
    listed = Path(uri.removeprefix("mirror+file:").rstrip("/")).read_text().split()
    return next(word for word in listed if "://" in word)


def _build(root: Path) -> None:
    log.warning("building the Debian root of the HTCondor pool in %s (about a minute)", root)
    apt_install("debootstrap")
    part = root.with_name(root.name + ".part")
    for leftover in (part, root):
        shutil.rmtree(leftover, ignore_errors=True)
    mirror = find_mirror()
    _run_apart(["debootstrap", "--variant=minbase", SUITE, str(part), mirror])
    _run_apart(["sh", "-c", _INSTALL], ROOT=str(part), MIRROR=mirror.rstrip("/"))
    (part / "made.json").write_text(json.dumps(_describe(part)))
    part.rename(root)


def _run_apart(command: list[str], **environment: str) -> None:
    """Runs a command in mount and process namespaces of its own: nothing outlives it."""
    apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", *command]
    done = subprocess.run(
        apart,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    )
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed (exit {done.returncode}):\n{done.stdout[-3000:]}")


def _describe(root: Path) -> dict[str, object]:
    # Counted where packages put their files; a start may add empty mount points elsewhere.
    num_files = sum(len(files) for _, _, files in os.walk(root / "usr/lib"))
    programs = sorted(path.name for path in (root / "usr").glob("[bs]*in/condor_*"))
    return {"fingerprint": fingerprint(), "num_files": num_files, "programs": programs}


def _remove_others(root: Path) -> None:
    """Removes the roots of older recipes, except those in use (a running pool holds their lock)."""
    for other in root.parent.glob("condor-root-*"):
        if other.name.startswith(root.name) or not other.is_dir():
            continue
        with open(f"{other}.users", "a") as users:
            try:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            shutil.rmtree(other, ignore_errors=True)
            Path(f"{other}.users").unlink()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
