"""Records of text from a dataset on the Hugging Face hub."""

import re
from importlib import import_module
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from qtool.calibrate.text import Record, read_jsonl, read_text, record_of
from qtool.errors import QtoolError, UsageError

_REFERENCE = re.compile(r"hub:(?P<id>\w[\w.-]*(/\w[\w.-]*)?)(:(?P<split>[^:]*)(:(?P<column>[^:]+))?)?")
_SUFFIXES = (".parquet", ".jsonl", ".txt")


def load_hub(dataset: str, endpoint: str | None = None) -> list[Record]:
    """The records of ``hub:OWNER/NAME[:SPLIT[:COLUMN]]`` (split ``train`` unless named).

    Files come through huggingface_hub's cache. Raises UsageError when the reference has another form, or the
    dataset, its split or its column is not there, QtoolError when the hub cannot be reached.
    """
    reference = _REFERENCE.fullmatch(dataset)
    if reference is None:
        raise UsageError(f"{dataset}: not a dataset of the hub; wanted hub:OWNER/NAME[:SPLIT[:COLUMN]]")
    repository, split, column = reference["id"], reference["split"] or "train", reference["column"]
    try:
        folder = snapshot_download(
            repository,
            repo_type="dataset",
            endpoint=endpoint,
            allow_patterns=[f"*{split}*{suffix}" for suffix in _SUFFIXES],
        )
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UsageError(f"{dataset}: is not on the hub, or needs a login ('hf auth login')") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, ConnectionError) as error:
        raise QtoolError(
            f"{dataset}: the hub cannot be reached and the cache holds no copy; check the network, "
            "or name a local .txt or .jsonl file"
        ) from error
    paths = choose_files(dataset, [path for path in Path(folder).rglob("*") if path.is_file()], split)
    return [record for path in paths for record in _read(dataset, path, column)]


def choose_files(dataset: str, paths: list[Path], split: str) -> list[Path]:
    """The data files of one split, all of the first kind found; UsageError when there are none."""
    for suffix in _SUFFIXES:
        chosen = sorted(path for path in paths if path.suffix == suffix and split in str(path))
        if chosen:
            return chosen
    raise UsageError(
        f"{dataset}: holds no {', '.join(_SUFFIXES)} file of split {split!r}; name another split"
    )


def _read(dataset: str, path: Path, column: str | None) -> list[Record]:
    if path.suffix == ".txt":
        return read_text(path)
    if path.suffix == ".jsonl":
        return read_jsonl(path, column)
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError as error:
        raise UsageError(f"{dataset}: is stored as parquet; 'pip install pyarrow' reads it") from error
    return [record_of(str(path), row, column) for row in parquet.read_table(path).to_pylist()]
