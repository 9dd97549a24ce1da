"""Small JSON files, read with errors that say where: objects, and records that pydantic models describe."""

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from qtool.errors import QtoolError

_Record = TypeVar("_Record", bound=BaseModel)


def read_record(file: Path, kind: type[_Record], remedy: str) -> _Record:
    """The record in a file; QtoolError says what is wrong with it, and to do what `remedy` says."""
    try:
        return kind.model_validate_json(file.read_bytes())
    except OSError as error:
        raise QtoolError(f"{file}: cannot be read ({error.strerror})") from error
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        said = f"{where}: {problem['msg']} (got {problem['input']!r:.80})" if where else problem["msg"]
        raise QtoolError(f"{file}: {said}; {remedy}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; QtoolError names the file when it is missing, no JSON object or too deep."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise QtoolError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise QtoolError(f"{path}: is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise QtoolError(f"{path}: holds a JSON {type(content).__name__}, wanted an object")
    return content
