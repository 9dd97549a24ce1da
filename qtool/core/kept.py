"""Work that a killed run goes on with: files sealed with the sha256 of their bytes.

A seal tells a file that the disk damaged, which readers of numbers would take as it is.
"""

import json
import logging
from pathlib import Path

from qtool.core.files import sha256, write_text
from qtool.errors import UsageError

_log = logging.getLogger(__name__)


def check_begun(folder: Path, fingerprint: str, inputs: str) -> None:
    """Note what the work in `folder` is begun for; when it is taken up again, raise UsageError for another.

    `fingerprint` stands for everything that decides the result; `inputs` says in words what that is.
    """
    state, text = folder / "state.json", json.dumps({"sha256": fingerprint})
    if not state.exists():
        write_text(state, text)
    elif state.read_bytes() != text.encode():
        raise UsageError(
            f"{folder}: was begun with another {inputs}, or {state.name} there is damaged; remove the folder "
            "to start anew"
        )


def keep(temporary: Path, path: Path) -> None:
    """Rename a file that is written whole to `path`, which is new, and put its seal beside it."""
    write_text(_seal(path), sha256(temporary))
    temporary.replace(path)


def is_whole(path: Path) -> bool:
    """Whether a kept file has the bytes that were written."""
    seal = _seal(path)
    return seal.is_file() and seal.read_bytes() == sha256(path).encode()


def has_kept(path: Path) -> bool:
    """Whether a kept file is there and whole. A damaged one is removed, with a warning."""
    if not path.is_file():
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
