"""Records of text from a dataset on the Hugging Face hub."""

from importlib import import_module
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, RepositoryNotFoundError

from qtool.calibrate.text import Record, read_jsonl, read_text, record_of
from qtool.errors import QtoolError, UsageError

_SUFFIXES = (".parquet", ".jsonl", ".txt")


def load_hub(dataset: str, endpoint: str | None = None) -> list[Record]:
    """The records of ``hub:OWNER/NAME[:SPLIT[:COLUMN]]`` (split ``train`` unless named).

    Files come through huggingface_hub's cache. Raises UsageError when the dataset, its split or its column
    is not there, QtoolError when the hub cannot be reached.
    """
    _, repository, *rest = dataset.split(":")
    split, column = ([*rest, None, None])[:2]
    api = HfApi(endpoint=endpoint)
    try:
        names = choose_files(dataset, api.list_repo_files(repository, repo_type="dataset"), split or "train")
        paths = [Path(api.hf_hub_download(repository, name, repo_type="dataset")) for name in names]
    except (RepositoryNotFoundError, EntryNotFoundError) as error:
        raise UsageError(f"{dataset}: is not on the hub, or needs a login ('hf auth login')") from error
    except (HfHubHTTPError, OSError) as error:
        raise QtoolError(
            f"{dataset}: the hub cannot be reached ({type(error).__name__}); check the network, "
            "or name a local .txt or .jsonl file"
        ) from error
    return [record for path in paths for record in _read(dataset, path, column)]


def choose_files(dataset: str, names: list[str], split: str) -> list[str]:
    """The data files of one split, all of the first kind found; UsageError when there are none."""
    for suffix in _SUFFIXES:
        chosen = sorted(name for name in names if name.endswith(suffix) and split in name)
        if chosen:
            return chosen
    raise UsageError(
        f"{dataset}: holds no {', '.join(_SUFFIXES)} file of split {split!r}; files: {', '.join(names)}"
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
