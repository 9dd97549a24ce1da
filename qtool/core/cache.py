"""The cache folder: what is costly to make and can be made again, built once."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from qtool.core.files import new_folder
from qtool.errors import QtoolError


def cache_folder() -> Path:
    """Where qtool keeps what it can make again: ``$QTOOL_CACHE``, else ``~/.cache/qtool``."""
    return Path(os.environ.get("QTOOL_CACHE") or Path.home() / ".cache" / "qtool")


def build_once(path: Path, build: Callable[[Path], None]) -> Path:
    """The folder `path`, filled by `build(folder)` if it is not there yet.

    A build that fails leaves nothing. Of several processes that ask at once one builds and the others
    wait for it; the lock is the kernel's, so that a killed builder releases it.
    """
    if path.is_dir():
        return path
    lock = path.with_name(f".{path.name}.lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        handle = lock.open("w")
    except OSError as error:
        raise QtoolError(
            f"{lock.parent}: the cache folder cannot be written to ({error.strerror}); "
            "set QTOOL_CACHE to a folder that can"
        ) from error
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        if not path.is_dir():
            with new_folder(path) as folder:
                build(folder)
    return path
