"""The XRootD daemons: their configuration, how they are started and whether they answer."""

from __future__ import annotations

import http.client
import os
import shutil
import subprocess
import time
from pathlib import Path

from tests.cluster.lifetime import MARK
from tests.cluster.osdf.layout import HOST, NAMESPACES, Layout

# XRootD 5.5 always listens on every interface: xrd.allow turns away all but loopback at accept.
_COMMON = """\
all.role server
all.export /
all.adminpath {folder}/admin
all.pidpath {folder}/run
oss.localroot {folder}/data
xrd.allow host 127.0.0.1
xrd.allow host localhost
xrd.port {root_port}
xrd.protocol http:{http_port} libXrdHttp.so
"""
_ORIGIN = "xrootd.chksum max 2 md5 adler32 crc32c\n"
_CACHE = """\
ofs.osslib libXrdPss.so
pss.cachelib libXrdPfc.so
pss.origin 127.0.0.1:{origin_port}
pfc.ram 1g
pfc.blocksize 1m
pfc.prefetch 0
pfc.diskusage 0.98 0.99
"""


def start_server(layout: Layout, server: str) -> None:
    """Starts the origin or a cache as the user xrootd, which the Debian package makes."""
    folder = layout.folder / server
    folders = [folder, folder / "data", folder / "admin", folder / "run"]
    if server == "origin":
        folders += [folder / "data" / namespace.strip("/") for namespace in NAMESPACES]
    for path in folders:
        path.mkdir(parents=True, exist_ok=True)
        shutil.chown(path, "xrootd", "xrootd")
    config = folder / "xrootd.cfg"
    config.write_text(configuration(layout, server))
    command = ["xrootd", "-R", "xrootd", "-n", server, "-c", str(config), "-b"]
    environment = {**os.environ, MARK: str(layout.folder)}
    subprocess.run([*command, "-l", str(folder / "log")], check=True, env=environment, cwd=folder)


def configuration(layout: Layout, server: str) -> str:
    """The text of a server's configuration file."""
    kind = _ORIGIN if server == "origin" else _CACHE
    return (_COMMON + kind).format(
        folder=layout.folder / server,
        root_port=layout.root_port(server),
        http_port=layout.http_port(server),
        origin_port=layout.root_port("origin"),
    )


def answers(layout: Layout, server: str) -> bool:
    """Whether the server's HTTP port answers as XRootD (a cache: with the origin behind it)."""
    connection = http.client.HTTPConnection(HOST, layout.http_port(server), timeout=5)
    try:
        connection.request("HEAD", NAMESPACES[0])
        answer = connection.getresponse()
        return answer.status == 200 and (answer.getheader("Server") or "").startswith("XrootD")
    except OSError:
        return False
    finally:
        connection.close()


def wait_until_answering(layout: Layout, server: str, patience_s: float = 120.0) -> None:
    """Returns when the server answers; its log's end is in the error when it does not."""
    deadline_s = time.monotonic() + patience_s
    while not answers(layout, server):
        if time.monotonic() > deadline_s:
            log = read_log(layout, server)
            raise RuntimeError(f"XRootD {server} does not answer after {patience_s} s:\n{log}")
        time.sleep(0.05)


def read_log(layout: Layout, server: str) -> str:
    """The end of the server's log (XRootD puts it in a folder of the server's name)."""
    logs: list[Path] = sorted((layout.folder / server).rglob("log"))
    return "".join(path.read_text(errors="replace")[-3000:] for path in logs if path.is_file())
