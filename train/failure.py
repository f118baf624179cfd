"""How a run ends badly: which error is whose, said once over all ranks, and the exit code."""

from __future__ import annotations

import errno
import os
import sys
import traceback

import torch

from dataset.errors import (
    CHECKPOINTED,
    CRASH,
    DIVERGED,
    INTERRUPTED,
    TRY_AGAIN,
    USER_MISTAKE,
    CommandError,
    describe_os_error,
)
from train.comm import Comm
from train.recorder import Recorder

ADVICE = "; the last good checkpoint is kept: lower --lr, lengthen the warm-up, or use fp32"
# What torch writes when a collective fails because another rank is gone.
_LOST_PEER = (
    *("Connection closed by peer", "Connection reset", "Timed out", "Application timeout"),
    *("gloo", "NCCL", "c10d"),
)

# What a network disk answers that is away for a while; of an image it is said in train/sources.py.
_DISK_AWAY = (errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN)


class Diverged(CommandError):
    """The loss or the weights are no longer numbers; the last good checkpoint is kept."""

    exit_code = DIVERGED


def explain(error: BaseException) -> tuple[str, int]:
    """(message, exit code) of an error."""
    if isinstance(error, CommandError):
        return str(error), error.exit_code
    if isinstance(error, OSError):
        message = describe_os_error(error)
        if message:
            return message, USER_MISTAKE
        if error.errno in _DISK_AWAY:
            return f"{error}; run the same command again", TRY_AGAIN
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; run the same command again", INTERRUPTED
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of GPU memory; lower --microbatch, the global batch stays", USER_MISTAKE
    if isinstance(error, RuntimeError) and "DataLoader worker" in str(error):
        reason = str(error).splitlines()[0]
        return f"a loader worker died: {reason} Out of memory? Lower -j/--workers", TRY_AGAIN
    return f"{type(error).__name__}: {error}", CRASH


def end_all_ranks(error: BaseException, comm: Comm, recorder: Recorder | None) -> int:
    """The exit code of a failed run; one of several ranks ends here, waiting for none."""
    message, code = explain(error)
    if comm.world_size > 1 and _is_about_others(error):
        message, code = comm.first_failure() or (message, code)
        print(f"rank {comm.rank} ends: {message}", file=sys.stderr, flush=True)
    elif comm.claim_failure():
        if code == CRASH:
            traceback.print_exception(error)
        print(f"error: {message}", file=sys.stderr, flush=True)
    record_failure(recorder, message, code)
    comm.announce_failure(message, code)
    if comm.world_size > 1:
        sys.stdout.flush()
        os._exit(code)  # destructors of a broken process group may wait for ever
    return code


def record_failure(recorder: Recorder | None, message: str, code: int) -> None:
    """Closes the record; a full disk must not hide the first error."""
    if recorder is None:
        return
    try:
        if code == CHECKPOINTED:  # another rank saved, see train/stranded.py
            recorder.finish("checkpointed", code, message)
        else:
            recorder.finish("failed", code, f"error: {message}")
    except OSError as error:
        print(f"run.json could not be written: {error}", file=sys.stderr, flush=True)


def _is_about_others(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone, and the fault is not here."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _LOST_PEER)
