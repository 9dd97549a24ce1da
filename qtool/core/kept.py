"""Work that a killed run goes on with: files sealed with the sha256 of their bytes.

A seal tells a file that the disk damaged, which readers of numbers would take as it is.
"""

import fcntl
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from qtool.core.files import PROBE, sha256, write_text
from qtool.errors import UsageError

_log = logging.getLogger(__name__)

_LOCK, _STATE = "lock", "state.json"


@contextmanager
def begun(folder: Path, decides: Mapping[str, object]) -> Iterator[None]:
    """Begin the work in `folder`, or take it up again, for this process alone.

    `decides` is all that decides the result, as JSON can hold it, by the words for it. Work that has kept
    nothing yet is begun anew with something else. Raises UsageError when the folder holds what is not such
    work, or work that was begun with something else, or while another run holds it.
    """
    _refuse_foreign(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"{folder}: another run is working there; wait for it") from error
        except OSError as error:
            _log.warning(
                "%s: this file system has no locks (%s); let no other run work there", folder, error.strerror
            )
        _check_begun(folder / _STATE, {word: _digest(value) for word, value in decides.items()})
        yield


def _refuse_foreign(folder: Path) -> None:
    """A folder that the work is to be alone in has to be the work's own."""
    if not folder.exists() and not folder.is_symlink():
        return
    advice = "unfinished work is kept in a folder of that name; move it away, or name another output"
    if not folder.is_dir():
        raise UsageError(f"{folder}: is in the way, {advice}")
    if (folder / _STATE).is_file():
        return
    found = _beside_lock(folder)
    if found:
        raise UsageError(f"{folder}: holds {found[0]}, and no {_STATE} of a run that was begun; {advice}")


def _beside_lock(folder: Path) -> list[str]:
    """What is in a folder, but for the lock and what a run that was killed while it wrote its state left."""
    names = sorted(path.name for path in folder.iterdir())
    return [name for name in names if name != _LOCK and not name.startswith(f".{_STATE}.")]


def _check_begun(state: Path, decides: Mapping[str, str]) -> None:
    if not state.exists():
        write_text(state, json.dumps(decides))
        return
    try:
        before = json.loads(state.read_bytes())
        others = [word for word, digest in decides.items() if before[word] != digest]
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{state}: is damaged, or another version's; remove {state.parent}") from error
    if others and _beside_lock(state.parent) == [_STATE]:
        write_text(state, json.dumps(decides))
    elif others:
        raise UsageError(
            f"{state.parent}: was begun with another {' and another '.join(others)}; give the same again, or "
            "remove the folder to start anew"
        )


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def clear(folder: Path, kept: Iterable[Path]) -> None:
    """Remove work that is done: the files `kept`, their seals, and what `begun` put into `folder`.

    Whatever else is there is not the work's own: it stays, the folder with it, and a warning names it.
    """
    kept = list(kept)
    begin = [folder / name for name in (PROBE, _STATE, _LOCK)]
    for path in [*kept, *map(_seal, kept), *begin]:
        with suppress(OSError):
            path.unlink()
    for inner in {path.parent for path in kept} - {folder}:
        with suppress(OSError):
            inner.rmdir()
    try:
        folder.rmdir()
    except OSError as error:
        why = _left(folder) or error.strerror
        _log.warning("%s: is left, since %s; look at it and remove it", folder, why)


def _left(folder: Path) -> str:
    """What is in a folder, in words; empty where it holds nothing."""
    found = sorted(folder.rglob("*"))
    names = [str(path.relative_to(folder)) for path in found if not path.is_dir() or not any(path.iterdir())]
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"it holds {names[0]}{others}, which qtool did not write" if names else ""


def keep(temporary: Path, path: Path) -> None:
    """Rename a file that is written whole to `path`, which is new, and put its seal beside it."""
    write_text(_seal(path), sha256(temporary))
    temporary.replace(path)


def is_whole(path: Path) -> bool:
    """Whether a kept file has the bytes that were written."""
    seal = _seal(path)
    return seal.is_file() and seal.read_bytes() == sha256(path).encode()


def has_kept(path: Path) -> bool:
    """Whether a kept file is there and whole. A damaged one is removed; of that and of a lost one there is a
    warning."""
    if not path.is_file():
        if _seal(path).is_file():
            _log.warning("%s: is gone; it is made anew", path)
        return False
    if is_whole(path):
        return True
    _log.warning("%s: is damaged; it is made anew", path)
    drop(path)
    return False


def drop(path: Path) -> None:
    """Remove a kept file and its seal."""
    path.unlink()
    _seal(path).unlink(missing_ok=True)


def _seal(path: Path) -> Path:
    return path.with_suffix(".sha256")
