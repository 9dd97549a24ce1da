import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from qtool.core.sources import resolve
from qtool.errors import UsageError
from tests.core.fake_hub import serve_hub
from tests.core.tiny_gguf import write_gguf


def _resolve_from(endpoint: str, cache: Path, reference: str) -> str:
    """What `resolve` returns or says in a process of its own: the hub's client reads its address once."""
    script = """
import sys
from qtool.core.sources import resolve
from qtool.errors import QtoolError
try:
    print(resolve(sys.argv[1]))
except QtoolError as error:
    print(type(error).__name__, error)
"""
    return subprocess.run(
        [sys.executable, "-c", script, reference],
        env={**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def test_a_folder_is_itself_even_when_it_has_a_hub_id_s_form(
    tiny_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve(str(tiny_copy)) == tiny_copy
    monkeypatch.chdir(tiny_copy.parent.parent)
    reference = f"{tiny_copy.parent.name}/{tiny_copy.name}"
    assert resolve(reference) == Path(reference)


def test_a_gguf_file_is_converted(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path / "cache"))
    folder = resolve(str(write_gguf(tiny, tmp_path / "tiny.gguf")))
    assert folder.is_relative_to(tmp_path / "cache")
    assert (folder / "tokenizer.json").is_file()


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("")
    with pytest.raises(UsageError, match=r"model\.bin: is a file"):
        resolve(str(tmp_path / "model.bin"))


@pytest.mark.parametrize(
    "reference", ["smollm2-135m-instrukt", "./none", "/none/there", "a/b/c", "none.gguf"]
)
def test_what_is_no_model_is_refused_with_all_that_was_tried(reference: str) -> None:
    with pytest.raises(UsageError) as refused:
        resolve(reference)
    for tried in (reference, "folder", ".gguf", "built-in model", "smollm2-135m-instruct", "hub id"):
        assert tried in str(refused.value)


@pytest.mark.parametrize("reference", ["owner/name", "owner/name@v1"])
def test_a_hub_id_is_downloaded_without_what_is_not_needed(
    tiny_copy: Path, tmp_path: Path, reference: str
) -> None:
    for name in ("pytorch_model.bin", "README.md", "run.py"):
        (tiny_copy / name).write_text("not needed")
    with serve_hub(tiny_copy) as (endpoint, asked):
        folder = Path(_resolve_from(endpoint, tmp_path / "hf", reference))
    names = {path.name for path in tiny_copy.iterdir()} - {"pytorch_model.bin", "README.md", "run.py"}
    assert {path.name for path in folder.iterdir()} == names == set(asked)
    for name in names:
        assert (folder / name).read_bytes() == (tiny_copy / name).read_bytes()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("RepoNotFound", "UsageError owner/name: no such local folder, and no such model on the hub"),
        ("GatedRepo", "QtoolError owner/name: the hub wants its terms accepted"),
        ("RevisionNotFound", "UsageError owner/name: the hub's model has no revision"),
    ],
)
def test_what_the_hub_refuses_is_told(tiny: Path, tmp_path: Path, code: str, said: str) -> None:
    with serve_hub(tiny, refusal=code) as (endpoint, _):
        assert _resolve_from(endpoint, tmp_path / "hf", "owner/name").startswith(said)


def test_a_hub_that_cannot_be_reached_names_what_to_do_instead(tmp_path: Path) -> None:
    said = _resolve_from("http://127.0.0.1:9", tmp_path / "hf", "owner/name")
    assert said.startswith(
        "QtoolError owner/name: no such local folder, and the hub cannot be reached (Connect"
    )
    assert "smollm2-135m-instruct" in said
    assert "\n" not in said


def test_a_model_downloaded_before_is_found_without_the_hub(tiny: Path, tmp_path: Path) -> None:
    with serve_hub(tiny) as (endpoint, _):
        folder = _resolve_from(endpoint, tmp_path / "hf", "owner/name")
    assert _resolve_from("http://127.0.0.1:9", tmp_path / "hf", "owner/name") == folder


def test_a_repository_that_is_no_checkpoint_is_refused(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    folder.mkdir()
    shutil.copy(tiny / "tokenizer.json", folder)
    with serve_hub(folder) as (endpoint, _):
        said = _resolve_from(endpoint, tmp_path / "hf", "owner/name")
    assert said == "UsageError owner/name: the hub's repository has no config.json, so it is no checkpoint"
