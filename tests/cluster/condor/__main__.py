"""`python -m tests.cluster.condor COMMAND...`: a command as the pool's ordinary user."""

from __future__ import annotations

import os
import shlex
import sys
from typing import NoReturn

from tests.cluster.condor.layout import WORK
from tests.cluster.condor.pool import enter


def main() -> NoReturn:
    """Becomes the command, in the pool."""
    command = shlex.join(sys.argv[1:]) or "condor_status"
    try:
        line = enter(f"cd {WORK} && {command}")
    except LookupError as error:  # the pool is down
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    os.execvp(line[0], line)


if __name__ == "__main__":
    main()
