"""Things that are named now and imported when they are needed, since their packages are heavy or optional."""

from importlib import import_module
from typing import Any

from qtool.errors import UsageError


def load(path: str, extra: str) -> Any:
    """What ``module:name`` names.

    Raises UsageError when a package that it imports is missing, naming the `extra` of qtool that brings it.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{extra} needs the package {error.name}, which is not installed; in qtool's folder: "
            f"pip install -e '.[{extra}]'"
        ) from error
