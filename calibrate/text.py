"""A dataset reference → records of text, the same ones in the same order every time."""

import hashlib
import json
from pathlib import Path

from qtool.errors import UsageError, nearest

Message = dict[str, str]
"""One turn of a chat: its ``role`` and ``content``."""

Record = str | list[Message]
"""A piece of running text, or a chat."""

_HUB = "hub:"
_BUILTIN = "builtin:"


def load_records(dataset: str) -> list[Record]:
    """The records behind a recipe's ``calibration.dataset``.

    A ``.txt`` file is one record; a ``.jsonl`` file holds a record a line, under ``text`` or ``messages``;
    ``builtin:pydoc`` is Python's own language reference, which every installation carries, and
    ``builtin:pydoc-test`` an eighth of its topics that the other leaves out;
    ``hub:OWNER/NAME[:SPLIT[:COLUMN]]`` is fetched from the Hugging Face hub. Raises UsageError when the
    reference is unknown, unreadable, or holds no text.
    """
    if dataset.startswith(_HUB):
        from qtool.calibrate.hub import load_hub

        return load_hub(dataset)
    if dataset.startswith(_BUILTIN):
        return _builtin(dataset)
    path = Path(dataset)
    readers = {".txt": read_text, ".jsonl": read_jsonl}
    if path.suffix not in readers:
        raise UsageError(
            f"{dataset}: not a dataset reference; wanted a .txt or .jsonl file, builtin:pydoc, "
            "or hub:OWNER/NAME[:SPLIT[:COLUMN]]"
        )
    return readers[path.suffix](path)


def digest(records: list[Record]) -> str:
    """The sha256 of the records' content, in hexadecimal."""
    return hashlib.sha256(json.dumps(records).encode()).hexdigest()


def _builtin(dataset: str) -> list[Record]:
    known = {f"{_BUILTIN}pydoc": False, f"{_BUILTIN}pydoc-test": True}
    if dataset not in known:
        raise UsageError(f"{dataset}: unknown built-in dataset; {nearest(dataset, known)}")
    from pydoc_data.topics import topics

    held_out = known[dataset]
    texts = dict.fromkeys(topics[name] for name in sorted(topics))  # some topics share their text
    return [text for index, text in enumerate(texts) if (index % 8 == 1) is held_out]


def read_text(path: Path) -> list[Record]:
    """A text file as one record."""
    text = _read(path)
    if not text.strip():
        raise UsageError(f"{path}: holds no text; name a dataset with text in it")
    return [text]


def read_jsonl(path: Path, column: str | None = None) -> list[Record]:
    """A record a line: the value under `column`, or else under ``text`` or ``messages``."""
    # no splitlines: a string in JSON may hold other line ends, such as U+2028, as they are
    lines = [(number, line) for number, line in enumerate(_read(path).split("\n"), 1) if line.strip()]
    if not lines:
        raise UsageError(f"{path}: holds no records; name a dataset with text in it")
    return [_parse(f"{path}:{number}", line, column) for number, line in lines]


def _parse(where: str, line: str, column: str | None) -> Record:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: is not valid JSON ({error}); wanted one JSON object a line") from error
    if not isinstance(row, dict):
        raise UsageError(f"{where}: holds a JSON {type(row).__name__}, wanted an object with 'text'")
    return record_of(where, row, column)


def record_of(where: str, row: dict[str, object], column: str | None) -> Record:
    """One row of a table as a record; UsageError tells the columns when the wanted one is not there."""
    columns = ["text", "messages"] if column is None else [column]
    value = next((row[name] for name in columns if name in row), None)
    if isinstance(value, str):
        return _whole(where, value)
    if isinstance(value, list) and value and all(_is_message(turn) for turn in value):
        return [{key: _whole(where, turn[key]) for key in ("role", "content")} for turn in value]
    raise UsageError(
        f"{where}: has no text under {' or '.join(map(repr, columns))}; it has {', '.join(map(str, row))}; "
        "wanted a string, or messages of role and content"
    )


def _whole(where: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{where}: has half a surrogate pair ({error}); convert the text to UTF-8"
        ) from error
    return text


def _is_message(turn: object) -> bool:
    return isinstance(turn, dict) and all(isinstance(turn.get(key), str) for key in ("role", "content"))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); name an existing file") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8 text ({error}); convert it first") from error
