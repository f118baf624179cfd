"""Whether each XRootD still lives, and a new start for one that died: a third party's crash.

A cache was once found dead in the middle of the tests; why is not known. XRootD's own reports name
races of its file cache that end it: a question about a file that is just being opened
(xrootd/xrootd issue 2420), a client that leaves while its last block is written (2533).
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.cluster import lifetime
from tests.cluster.osdf import xrootd
from tests.cluster.osdf.layout import SERVERS, Layout

PATIENCE_S = 30.0  # for one that lives and does not answer, on a machine with other work


class ServerDied(UserWarning):
    """An XRootD ended or fell silent by itself, and was started again."""


def find_ill(layout: Layout) -> list[str]:
    """The servers that died or do not answer; one that a test stopped is not ill."""
    return [
        server
        for server in SERVERS
        if not was_stopped(layout, server)
        and not (is_alive(layout, server) and xrootd.answers(layout, server))
    ]


def is_alive(layout: Layout, server: str) -> bool:
    """Whether the process of the server is there."""
    return any(lifetime.is_marked(pid, layout.folder) for pid in read_pids(layout, server))


def read_pids(layout: Layout, server: str) -> list[int]:
    """What the server wrote down as its process id when it started."""
    files = (layout.folder / server).rglob("*.pid")
    return [int(text) for text in (file.read_text().strip() for file in files) if text.isdigit()]


def note_stop(layout: Layout, server: str, is_meant: bool) -> None:
    """Writes down that a test stopped the server, or that it no longer is."""
    mark = _stop_mark(layout, server)
    if is_meant:
        mark.touch()
    else:
        mark.unlink(missing_ok=True)


def was_stopped(layout: Layout, server: str) -> bool:
    """Whether a test stopped the server on purpose."""
    return _stop_mark(layout, server).exists()


def cure(layout: Layout, server: str) -> str | None:
    """Starts a server again on its data; what was found, or None if it was only slow to answer."""
    pids, alive = read_pids(layout, server), is_alive(layout, server)
    if alive and _answers_in_time(layout, server):
        return None
    found = describe_end(layout, server, pids, alive)
    own = lambda: [pid for pid in pids if lifetime.is_marked(pid, layout.folder)]  # noqa: E731
    lifetime.end_processes(own)
    xrootd.start_server(layout, server)
    xrootd.wait_until_answering(layout, server)
    return found


def describe_end(layout: Layout, server: str, pids: list[int], alive: bool) -> str:
    """How a server ended, as far as kernel, disk and its own log tell."""
    said = f"did not answer for {PATIENCE_S:.0f} s" if alive else "died"
    lines = [f"XRootD {server} (process {pids}) {said} and was started again"]
    lines += [f"kernel: {line}" for line in _read_kernel_log(pids)]
    lines += [f"core: {path}" for path in (layout.folder / server).rglob("core*") if path.is_file()]
    if len(lines) == 1 and not alive:
        lines.append("its signal is unknown: the kernel logged nothing, there is no core file")
    return "\n".join([*lines, "the end of its log:", xrootd.read_log(layout, server)])


def _answers_in_time(layout: Layout, server: str) -> bool:
    try:
        xrootd.wait_until_answering(layout, server, PATIENCE_S)
    except RuntimeError:
        return False
    return True


def _read_kernel_log(pids: list[int]) -> list[str]:
    """The kernel's lines about processes: segmentation faults, out of memory."""
    try:
        log = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace").stdout
    except FileNotFoundError:
        return []
    names = [name for pid in pids for name in (f"[{pid}]:", f"process {pid} ")]
    return [line for line in log.splitlines() if any(name in line for name in names)][-5:]


def _stop_mark(layout: Layout, server: str) -> Path:
    return layout.folder / server / "stopped-by-a-test"
