"""The exit codes of every command, and the exceptions that carry them."""

from __future__ import annotations

import errno
import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable

from dataset.packages import describe_missing, leave
from dataset.redaction import printable, redact

DONE = 0
CRASH = 1  # our bug: a traceback
USER_MISTAKE = 2
BAD_DATA = 3
DIVERGED = 4
TRY_AGAIN = 75  # a passing failure (sysexits' EX_TEMPFAIL)
CHECKPOINTED = 85  # stopped with a checkpoint, unfinished: run me again
INTERRUPTED = 130  # Ctrl-C, as shells count it: nothing that was whole is lost
OUR_PACKAGES = {"dataset", "train", "report", "scripts", "condor"}


class CommandError(ValueError):
    """An error whose text is a whole message: what was wrong, the value seen, the fix."""

    exit_code = USER_MISTAKE


class UserError(CommandError):
    """A user error: one line says what is wrong and how to fix it."""


class FinalError(UserError):
    """A user error that no retry or other machine can fix, such as a path that does not exist."""


class DataError(CommandError):
    """Data failed verification."""

    exit_code = BAD_DATA


class PassingError(CommandError):
    """A temporary failure: the same command may work later."""

    exit_code = TRY_AGAIN


# Errors of the operating system that are about the user's files and not about our code.
_USER_ERRNOS = {
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.EEXIST: "something else has this name: move it away, or choose another path",
    errno.ELOOP: "a link leads back to itself: move it away",
    errno.ENXIO: "it is a socket or a device: move it away",
    errno.EISDIR: "a file is expected here, not a folder",
    errno.EACCES: "check the permissions",
    errno.EPERM: "check the permissions",
    errno.EROFS: "choose a folder that can be written",
    errno.ENOSPC: "free some space and run the same command again",
    errno.EDQUOT: "free some of your quota and run the same command again",
    errno.EIO: "the disk is failing: see the machine's log, or choose another disk",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.EFBIG: "this disk or a limit (ulimit -f) takes no file of that size; choose another",
}


def describe_os_error(error: OSError) -> str | None:
    """The one-line message for an OSError that the user can fix, or None when it is our bug."""
    fix = _USER_ERRNOS.get(error.errno or 0)
    if fix is None:
        return None
    where = f": {error.filename}" if error.filename else ""
    return f"{error.strerror}{where}; {fix}"


def run_command(main: Callable[[], int | None]) -> int:
    """The exit code of main(), with a CommandError or a user's OSError printed as one line."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # A path may have bytes that are no UTF-8: they are shown escaped, as on standard error.
        sys.stdout.reconfigure(errors="backslashreplace")
    is_command = signal.getsignal(signal.SIGINT) is leave  # as its imports left it
    if is_command:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a Ctrl-C now tidies up first
    try:
        return main() or DONE
    except CommandError as error:
        return _report(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        if not error.name or error.name.partition(".")[0] in OUR_PACKAGES:
            raise
        return _report(describe_missing(error.name), USER_MISTAKE)
    except KeyboardInterrupt:
        return _report("interrupted; run the same command again to continue", INTERRUPTED)
    except BrokenPipeError:  # `… | head`: keep the interpreter's last flush quiet too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except Exception as error:
        message = describe_os_error(error) if isinstance(error, OSError) else None
        if message is None:
            print(redact(traceback.format_exc()), end="", file=sys.stderr, flush=True)
            return CRASH
        return _report(message, USER_MISTAKE)
    finally:  # the rest may wait for threads: a second Ctrl-C need not
        if is_command:
            signal.signal(signal.SIGINT, leave)


def _report(message: str, code: int) -> int:
    logging.getLogger("trainyard").debug("exit %d", code, exc_info=True)
    print(printable(redact(f"error: {message}")), file=sys.stderr, flush=True)
    return code
