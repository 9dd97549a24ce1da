"""What a person sees when a command fails, and the exit code that a script sees."""

import errno
import os
import traceback

import typer

from qtool.errors import QtoolError

_NEXT_STEP = {
    errno.ENOSPC: "free some space or name an output on another disk",
    errno.EDQUOT: "free some space or name an output on another disk",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f) or name an output elsewhere",
    errno.EACCES: "change its permissions or name another path",
    errno.EROFS: "name a path on a disk that can be written to",
    errno.EADDRINUSE: "name another port",
}


def enable_debug() -> None:
    """From here on, in child processes too, show the traceback of an error."""
    os.environ["QTOOL_DEBUG"] = "1"


def report(error: Exception) -> int:
    """Print an error on stderr, its traceback first when debugging; returns the exit code it asks for."""
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
