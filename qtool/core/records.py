"""Records: small JSON files that pydantic models describe, read with errors that name the field."""

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from qtool.errors import QtoolError

_Record = TypeVar("_Record", bound=BaseModel)


def read_record(file: Path, kind: type[_Record], remedy: str) -> _Record:
    """The record in a file; QtoolError says what is wrong with it, and to do what `remedy` says."""
    try:
        return kind.model_validate_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise QtoolError(f"{file}: cannot be read ({error.strerror})") from error
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        said = f"{where}: {problem['msg']} (got {problem['input']!r:.80})" if where else problem["msg"]
        raise QtoolError(f"{file}: {said}; {remedy}") from error
