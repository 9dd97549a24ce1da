"""Files that are either whole or absent: write under a temporary name, rename at the end."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qtool.errors import QtoolError, UsageError

_CHUNK = 1 << 20


def sha256(path: Path) -> str:
    """The sha256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def write_text(path: Path, text: str) -> None:
    """Write a text file whole: a reader sees the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def refuse_existing(path: Path) -> None:
    """Raise UsageError when an output path exists or its parent can't be written to."""
    if path.exists():
        raise UsageError(f"{path}: already exists; name another output, or remove it first")
    parent = path.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise QtoolError(f"{parent}: cannot be created ({error.strerror}); name another output") from error
    if not os.access(parent, os.W_OK):
        raise QtoolError(f"{parent}: is not writable; name another output or change its permissions")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, renamed to `path` when the block ends well and removed when it does not.

    Raises UsageError when `path` exists, QtoolError when its parent is not writable.
    """
    refuse_existing(path)
    temporary = path.absolute().with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.mkdir()
        yield temporary
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
