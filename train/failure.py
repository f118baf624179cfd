"""How a run fails: whose error it is (a rank's, a GPU's, NCCL's), told once, and the exit code."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

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
from train.data.loader import explain_dead_worker, is_dead_worker
from train.microbatch import is_out_of_memory, refuse_for_memory
from train.ranks.comm import Comm
from train.records.recorder import Recorder

ADVICE = "; the last good checkpoint is kept: lower --lr, lengthen the warm-up, or use fp32"
# What gloo, NCCL and the store write when another rank is gone: a connection was closed, reset or
# refused, or timed out. Any other message is about this rank.
_LOST_PEER = re.compile(
    r"connection (was likely )?(closed|reset|refused)|closed by (remote )?peer|reset by peer"
    r"|broken pipe|got 0 bytes|remote process exited|time(d |-)?out",
    re.IGNORECASE,
)
# What CUDA says of a GPU that is broken, lost, or held by somebody else. A GPU that has fallen off
# the bus (Xid 79 in the node's log) is an "unknown error" or an "unspecified launch failure".
_BROKEN_GPU = re.compile(
    r"ECC error|NVLink error|hardware (stack )?error|fallen off the bus|GPU is lost"
    r"|busy or unavailable|CUDA error: unknown error|unspecified launch failure",
    re.IGNORECASE,
)
_TRAILER = re.compile(r"Exception raised from|\nSearch for `cuda|This may indicate")
_MAX_ERROR_CHARS = 500

# Errors of a network disk that is away for a while; train/data/sources.py handles those of images.
_DISK_AWAY = (errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN)


_ABORT_HOOK_ID = 0x7261696E  # ours among the hooks of NCCL's backend

OpenRecord = Callable[[], Recorder | None]


class Diverged(CommandError):
    """The loss or the weights are not finite; the last good checkpoint is kept."""

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
    if is_out_of_memory(error):
        message = "out of GPU memory; use a smaller --microbatch (the global batch stays the same)"
        refusal = refuse_for_memory(message, os.environ)
        return str(refusal), refusal.exit_code
    if isinstance(error, RuntimeError) and _BROKEN_GPU.search(str(error)):
        host = os.uname().nodename
        message = f"the GPU of this rank on {host} failed: {shorten(error)}"
        return f"{message}; run the same command again, on another node if it repeats", TRY_AGAIN
    if isinstance(error, RuntimeError) and "NCCL" in str(error):
        code = USER_MISTAKE if "invalid usage" in str(error) else TRY_AGAIN
        said = last_nccl_error()
        detail = f" ({said})" if said and said not in str(error) else ""
        return f"NCCL failed: {shorten(error)}{detail}; NCCL_DEBUG=INFO shows more", code
    if isinstance(error, RuntimeError) and is_dead_worker(error):
        return explain(explain_dead_worker(error))
    return f"{type(error).__name__}: {error}", CRASH


def shorten(error: BaseException) -> str:
    """An error of torch on one line, without its advice and C++ stack."""
    text = _TRAILER.split(str(error), maxsplit=1)[0]
    return " ".join(text.split())[:_MAX_ERROR_CHARS].rstrip(" .;")


def end_all_ranks(error: BaseException, comm: Comm, open_record: OpenRecord) -> int:
    """The exit code of a failed run; with several ranks, ends the process without waiting."""
    message, code = explain(error)
    if comm.world_size > 1 and _is_about_others(error):
        print(f"rank {comm.rank}: {shorten(error)}", file=sys.stderr, flush=True)
        message, code = comm.first_failure() or (message, code)
        print(f"rank {comm.rank} ends: {message}", file=sys.stderr, flush=True)
    elif comm.claim_failure():
        if code == CRASH:
            traceback.print_exception(error)
        print(f"error: {message}", file=sys.stderr, flush=True)
    record_failure(open_record, message, code)
    comm.announce_failure(message, code)
    if comm.world_size > 1:
        sys.stdout.flush()
        os._exit(code)  # destructors of a broken process group may hang
    return code


def record_failure(open_record: OpenRecord, message: str, code: int) -> None:
    """Closes the record; a full disk or a damaged record must not hide the original error."""
    try:
        recorder = open_record()
        if recorder is None:
            return
        if code == CHECKPOINTED:  # another rank saved, see train/saving.py
            recorder.finish("checkpointed", code, message)
        else:
            recorder.finish("failed", code, f"error: {message}")
    except (OSError, CommandError) as error:
        print(f"run.json could not be written: {error}", file=sys.stderr, flush=True)


def _is_about_others(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone, not because of this one."""
    return isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)) is not None


def last_nccl_error() -> str:
    """NCCL's last error message in this process; empty if NCCL is not loaded as a library."""
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        library.ncclGetLastError.restype = ctypes.c_char_p
        said: bytes | None = library.ncclGetLastError(None)
    except (OSError, AttributeError):
        return ""
    return (said or b"").decode(errors="replace").strip()


def call_before_abort(device: torch.device, action: Callable[[RuntimeError], object]) -> None:
    """Calls action when NCCL's watching thread is about to abort the process (torch >= 2.15).

    Without this a run would end with signal 6, and its record would still say "running".
    """
    group: Any = dist.group.WORLD
    if group is None:  # one rank
        return
    backend = group._get_backend(device)
    if getattr(backend, "supports_abort_hooks", False):
        backend.register_abort_hook(_ABORT_HOOK_ID, lambda: action(_find_reason(device)))


def _find_reason(device: torch.device) -> RuntimeError:
    """Why the process is about to be aborted: a GPU that fails, or else NCCL."""
    try:
        torch.cuda.current_stream(device).query()
    except RuntimeError as error:
        return error
    return RuntimeError(f"NCCL ends this process: {last_nccl_error() or 'its log above says why'}")
