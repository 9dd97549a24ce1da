"""Where a model comes from: a folder, a GGUF file, the built-in catalog, or the Hugging Face hub."""

import re
from pathlib import Path

from qtool.core.catalog import CATALOG, fetch
from qtool.core.gguf import from_gguf
from qtool.errors import QtoolError, UsageError, nearest

_HUB_ID = re.compile(r"(?P<id>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt"]


def resolve(reference: str) -> Path:
    """The folder of the model that `reference` names.

    In this order: a folder; a ``.gguf`` file, converted once into the cache; a name of the built-in
    catalog, fetched once; a hub id ``OWNER/NAME`` or ``OWNER/NAME@REVISION``, downloaded into Hugging
    Face's own cache. Raises UsageError when it is none of these, QtoolError when a download fails.
    """
    path = Path(reference).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise UsageError(f"{reference}: is a file; wanted a checkpoint folder or a .gguf file")
        return from_gguf(path)
    if reference in CATALOG:
        return fetch(reference)
    if hub := _HUB_ID.fullmatch(reference):
        return _download(reference, hub["id"], hub["revision"])
    raise UsageError(
        f"{reference}: no such folder or .gguf file, no built-in model ({nearest(reference, CATALOG)}), "
        "and no hub id (OWNER/NAME)"
    )


def _download(reference: str, repo_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        folder = Path(snapshot_download(repo_id, revision=revision, allow_patterns=_HUB_FILES))
    except GatedRepoError as error:
        raise QtoolError(
            f"{reference}: the hub wants its terms accepted; accept them on the model's page, "
            "log in with 'hf auth login', and rerun"
        ) from error
    except RepositoryNotFoundError as error:
        raise UsageError(
            f"{reference}: no such local folder, and no such model on the hub (or a private one: "
            "log in with 'hf auth login')"
        ) from error
    except RevisionNotFoundError as error:
        raise UsageError(f"{reference}: the hub's model has no revision {revision!r}") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, ConnectionError) as error:
        cause = error.__cause__ or error
        reason = f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}"
        raise QtoolError(
            f"{reference}: no such local folder, and the hub cannot be reached "
            f"({reason}); give the path of a checkpoint folder or a .gguf file, "
            f"or a built-in model: {', '.join(CATALOG)}"
        ) from error
    if not (folder / "config.json").is_file():
        raise UsageError(f"{reference}: the hub's repository has no config.json, so it is no checkpoint")
    return folder
