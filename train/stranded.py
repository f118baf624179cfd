"""How a rank stops all ranks when its batch never arrives: it saves a checkpoint and ends them.

The other ranks wait for it in an exchange that they cannot leave. After each finished step all
ranks hold the same state. This rank holds the last state that all of them reached, since nobody
can finish the current step without it.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch

from dataset.errors import CHECKPOINTED
from train.checkpoints import checkpoint
from train.data.patience import Stranded
from train.prepare import Setup
from train.ranks.batch_system import requeue
from train.ranks.comm import HEARTBEAT_S, Comm
from train.ranks.interrupt import CANCELLED, GRACE_S
from train.records.recorder import Recorder

log = logging.getLogger("trainyard")


def stop_for_all(
    stranded: Stranded,
    reason: str,
    setup: Setup,
    comm: Comm,
    recorder: Recorder | None,
    make_state: Callable[[], checkpoint.State],
) -> NoReturn:
    """Saves, records, tells the other ranks, asks for a requeue where one is due, and exits 85."""
    while _has_pending_work(setup.placement.device):
        time.sleep(0.1)
    if not comm.claim("stop"):  # another rank does this already, and will tell this one
        time.sleep(2 * GRACE_S)
        _leave()
    state = make_state()
    kind = "a" if _save(setup.output / "ckpt", state) else "NO NEW"
    message = f"{reason}: stopped at step {state['step']} with {kind} checkpoint; {stranded}"
    log.warning("%s", message)
    if recorder is not None:
        recorder.finish("checkpointed", CHECKPOINTED, message)
    comm.announce_failure(message, CHECKPOINTED)
    time.sleep(2 * HEARTBEAT_S)  # rank 0 closes its record before a requeue ends it
    if stranded.vote.requeues and reason not in CANCELLED:
        requeue(setup.launch.job)
    _leave()


def _has_pending_work(device: torch.device) -> bool:
    """Whether the device waits for another rank, which is a step behind and saves instead."""
    return device.type == "cuda" and not torch.cuda.current_stream(device).query()


def _save(folder: Path, state: checkpoint.State) -> bool:
    """Whether the state is on the disk; waits if rank 0 is still writing its last one."""
    deadline_s = time.monotonic() + GRACE_S
    while any(folder.glob("*.part")) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    writer = checkpoint.CheckpointWriter(folder)
    writer.save(state | {"schema": checkpoint.SCHEMA})
    return writer.wait()


def _leave() -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(CHECKPOINTED)
