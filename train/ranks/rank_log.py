"""What a rank prints: rank 0 everything, the others only warnings and errors (no torch)."""

from __future__ import annotations

import logging
import sys

from train.ranks.launch import Launch

log = logging.getLogger("trainyard")


def set_up_logging(launch: Launch) -> None:
    """Lines with the time, on standard output; set up again it changes nothing."""
    handler = logging.StreamHandler(sys.stdout)
    rank = "" if launch.is_main else f"rank {launch.rank}: "
    handler.setFormatter(logging.Formatter(f"%(asctime)s {rank}%(message)s", "%H:%M:%S"))
    log.handlers[:] = [handler]
    log.setLevel(logging.INFO if launch.is_main else logging.WARNING)
    log.propagate = False
