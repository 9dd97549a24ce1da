"""What a person sees when a command fails, and the exit code that a script sees."""

import errno
import os
import signal
import traceback
from types import FrameType

import typer

from qtool.errors import QtoolError

_NEXT_STEP = {
    errno.ENOSPC: "free some space or name an output on another disk",
    errno.EDQUOT: "free some space or name an output on another disk",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f) or name an output elsewhere",
    errno.EACCES: "change its permissions or name another path",
    errno.EROFS: "name a path on a disk that can be written to",
    errno.ENAMETOOLONG: "name a shorter path",
    errno.EADDRINUSE: "name another port",
}


def enable_debug() -> None:
    """From here on, in child processes too, show the traceback of an error."""
    os.environ["QTOOL_DEBUG"] = "1"


def catch_sigterm() -> None:
    """From here on SIGTERM ends the process as an exit does: what is half written is removed on the way."""
    signal.signal(signal.SIGTERM, _exit_by_signal)


def _exit_by_signal(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one would stop the removal
    raise SystemExit(128 + number)


def interruption(error: BaseException | None) -> int | None:
    """The exit code of the signal that `error` came of, if it did.

    Modules in C++ that are interrupted while they are imported raise an ImportError from the interruption.
    """
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return 128 + signal.SIGINT
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            return error.code
        error = error.__cause__ or error.__context__
    return None


def report(error: BaseException) -> int:
    """Print an error on stderr, its traceback first when debugging; returns the exit code it asks for.

    What came of a signal is no error, and nothing is printed.
    """
    if (code := interruption(error)) is not None:
        return code
    debug = bool(os.environ.get("QTOOL_DEBUG"))
    if debug:
        traceback.print_exception(error)
    typer.secho("error: ", fg="red", bold=True, nl=False, err=True)
    if isinstance(error, QtoolError):
        typer.echo(str(error), err=True)
        return error.exit_code
    if isinstance(error, OSError) and error.errno in _NEXT_STEP:
        where = f"{error.filename}: " if error.filename else ""
        typer.echo(f"{where}{error.strerror}; {_NEXT_STEP[error.errno]}", err=True)
        return 1
    advice = "" if debug else "; rerun as 'qtool --debug ...' for the traceback"
    typer.echo(f"unexpected {type(error).__name__}: {error}{advice}", err=True)
    return 1
