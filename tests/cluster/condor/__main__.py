"""`python -m tests.cluster.condor COMMAND...`: a command as the pool's ordinary user."""

from __future__ import annotations

import os
import shlex
import sys

from tests.cluster.condor.layout import WORK
from tests.cluster.condor.pool import enter

if __name__ == "__main__":
    command = shlex.join(sys.argv[1:]) or "condor_status"
    line = enter(f"cd {WORK} && {command}")
    os.execvp(line[0], line)
