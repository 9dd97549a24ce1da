"""Files that are either whole or absent: write under a temporary name, rename at the end."""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qtool.errors import QtoolError, UsageError

_CHUNK = 1 << 20
_LONGEST_NAME = 230
"""Bytes: file systems take 255, and what is written under a temporary name adds to it."""


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
    """Raise UsageError when an output exists or its name is too long, QtoolError when it cannot be made."""
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in path.parts):
        raise UsageError(f"{path}: has a name of more than {_LONGEST_NAME} bytes; name a shorter output")
    if path.exists() or path.is_symlink():
        raise UsageError(f"{path}: already exists; name another output, or remove it first")
    ancestor = next(parent for parent in path.absolute().parents if parent.exists())
    if not ancestor.is_dir():
        raise QtoolError(f"{path}: cannot be created, since {ancestor} is no folder; name another output")
    if not os.access(ancestor, os.W_OK | os.X_OK):
        raise QtoolError(
            f"{path}: cannot be created, since {ancestor} is not writable; "
            "name another output or change its permissions"
        )


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, renamed to `path` when the block ends well and removed when it does not.

    Raises UsageError when `path` exists, QtoolError when it cannot be created or the disk is full.
    """
    refuse_existing(path)
    temporary = path.absolute().with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        temporary.rename(path)
    except Exception as error:
        told = isinstance(error, QtoolError)
        if reason := _no_room(error) or (None if told else _no_room(_probe(temporary))):
            raise QtoolError(
                f"{path}: could not be written ({reason}) and nothing of it was kept; "
                "free some space or name an output on another disk"
            ) from error
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _probe(folder: Path) -> Exception | None:
    """What comes of a file in `folder` that is one block larger than the largest there.

    That tells whether there is room where a library only says that it could not write. Nothing that is
    there is touched, since it may be a hard link to what must not change.
    """
    sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
    try:
        with (folder / ".probe").open("wb") as file:
            file.seek(max(sizes, default=0))
            file.write(bytes(_CHUNK))
    except OSError as error:
        return error
    return None


def _no_room(error: Exception | None) -> str | None:
    """Why there is no room for more, if that is what `error` says; safetensors says it in words only."""
    number = error.errno if isinstance(error, OSError) else None
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        if number == code or f"(os error {code})" in str(error):
            return os.strerror(code)
    return None
