"""Files that are either whole or absent: write under a temporary name, rename at the end.

The writer holds a lock on what has the temporary name. Where nobody holds it, the writer was killed, and the
next run for the same output removes it.
"""

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qtool.errors import QtoolError, UsageError

_CHUNK = 1 << 20
_SUFFIX = ".partial"
PROBE = ".probe"
"""A file that tells whether there is room, see `_probe`; one that is left was a killed run's."""
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
    with _temporary(path, Path.touch) as temporary:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)


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

    Raises UsageError when `path` exists, or does by then, QtoolError when it cannot be created or the disk is
    full.
    """
    refuse_existing(path)
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    with _temporary(path.absolute(), Path.mkdir) as temporary:
        try:
            yield temporary
            rename_new(temporary, path)
        except Exception as error:
            if reason := _full_disk(error, temporary):
                raise QtoolError(
                    f"{path}: could not be written ({reason}) and nothing of it was kept; "
                    "free some space or name an output on another disk"
                ) from error
            raise


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """Tell what stopped work in `folder`, and that it can go on.

    Raises QtoolError for every OSError, and for a full disk where libraries only say that they failed.
    """
    try:
        yield
    except Exception as error:
        again = "then give the same command" + (": it goes on where it was" if folder.is_dir() else "")
        if reason := _full_disk(error, folder):
            raise QtoolError(f"{folder}: could not be written ({reason}). Make room, {again}") from error
        if isinstance(error, OSError):
            entry, why = error.filename2 or error.filename or folder, error.strerror or error
            raise QtoolError(f"{entry}: cannot be used ({why}). Put that right, {again}") from error
        raise


def check_room(folder: Path) -> None:
    """Raise the OSError that tells of a full disk, if that is what keeps `folder` from growing."""
    error = _probe(folder)
    if error is not None and _no_room(error):
        raise error


def rename_new(temporary: Path, path: Path) -> None:
    """Give a finished folder its name; UsageError when something else has it by now."""
    try:
        temporary.rename(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise UsageError(
            f"{path}: already exists, since another run made it meanwhile; name another output"
        ) from error


@contextmanager
def _temporary(path: Path, make: Callable[[Path], object]) -> Iterator[Path]:
    """A new file or folder beside `path`, locked; removed at the end if it still has that name."""
    _remove_left_over(path)
    temporary, lock = _made(path, make)
    try:
        yield temporary
    finally:
        _remove(temporary)
        if lock is not None:
            os.close(lock)


def _made(path: Path, make: Callable[[Path], object]) -> tuple[Path, int | None]:
    """What was made, and its lock; None on a file system without locks, where nothing counts as left over."""
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_SUFFIX}")
        make(temporary)
        try:
            lock = _lock(temporary)
        except OSError:
            return temporary, None
        if lock is not None:
            return temporary, lock
        # another run took it for left over before it was locked


def _lock(path: Path) -> int | None:
    """Hold `path` until the descriptor given is closed; None when it is gone, or someone else holds it."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    if path.exists():
        return descriptor
    os.close(descriptor)
    return None


def _remove_left_over(path: Path) -> None:
    """Remove what killed runs for the same output left."""
    ours = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}{re.escape(_SUFFIX)}")
    for left in path.parent.iterdir():
        if not ours.fullmatch(left.name):
            continue
        with suppress(OSError):
            if (lock := _lock(left)) is not None:
                _remove(left)
                os.close(lock)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _full_disk(error: Exception, folder: Path) -> str | None:
    """Why there is no room, if that is what made `error` out of writing to `folder`."""
    told = isinstance(error, QtoolError)
    return _no_room(error) or (None if told else _no_room(_probe(folder)))


def _probe(folder: Path) -> Exception | None:
    """What comes of a file in `folder` that is one block larger than the largest there.

    That tells whether there is room where a library only says that it could not write. Nothing that is
    there is touched, since it may be a hard link to what must not change.
    """
    sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
    try:
        with (folder / PROBE).open("wb") as file:
            file.seek(max(sizes, default=0))
            file.write(bytes(_CHUNK))
    except OSError as error:
        return error
    finally:
        (folder / PROBE).unlink(missing_ok=True)
    return None


def _no_room(error: Exception | None) -> str | None:
    """Why there is no room for more, if that is what `error` says; safetensors says it in words only."""
    number = error.errno if isinstance(error, OSError) else None
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        if number == code or f"(os error {code})" in str(error):
            return os.strerror(code)
    return None
