"""A rank of a submitit job that is forked from a process which has torch already.

Python imports this file when it starts, if its folder is on PYTHONPATH. An interpreter that would
become a rank asks the test for a fork in its place (server.py), and lives as long as the fork.
"""

import json
import os
import signal
import socket
import sys
from pathlib import Path

PORT = "TEST_RANKS_PORT"

if sys.orig_argv[-2:-1] == ["submitit.core._submit"] and PORT in os.environ:
    request = {
        "folder": sys.orig_argv[-1],
        "here": str(Path.cwd()),
        "log": str(Path("/proc/self/fd/1").readlink()),
        "env": dict(os.environ),
    }
    with socket.create_connection(("127.0.0.1", int(os.environ[PORT]))) as server:
        server.sendall(json.dumps(request).encode() + b"\n")
        answers = server.makefile()
        pid = int(answers.readline() or 0)  # nothing comes if the test has ended
        signal.signal(signal.SIGTERM, lambda number, _: os.kill(pid, number) if pid else None)
        code = int(answers.readline() or 1)
    os._exit(code & 0xFF)
