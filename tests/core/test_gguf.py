import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoTokenizer

from qtool.core.checkpoint import Checkpoint
from qtool.core.gguf import convert, from_gguf
from qtool.errors import QtoolError, UsageError
from tests.core.tiny_gguf import write_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_gguf_of_full_precision_gives_every_tensor_back(tiny: Path, tmp_path: Path) -> None:
    original = Checkpoint(tiny)
    converted = Checkpoint(from_gguf(write_gguf(tiny, tmp_path / "tiny.gguf")))
    assert set(converted) == set(original)
    for name in original:
        assert torch.equal(converted.tensor(name), original.tensor(name)), name


def test_tokenizer_chat_template_and_end_tokens_survive(tiny: Path, tmp_path: Path) -> None:
    path = write_gguf(tiny, tmp_path / "tiny.gguf", metadata={"tokenizer.ggml.eot_token_id": 0})
    folder = from_gguf(path)
    original, converted = AutoTokenizer.from_pretrained(tiny), AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "naïve 木 \n\n 123"}]
    prompt = original.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert converted.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == prompt
    assert converted(prompt)["input_ids"] == original(prompt)["input_ids"]
    assert (converted.bos_token_id, converted.eos_token_id) == (1, 2)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


@pytest.mark.parametrize("wanted", [True, False])
def test_the_tokenizer_begins_a_text_with_bos_just_when_the_file_says_so(
    tiny: Path, tmp_path: Path, wanted: bool
) -> None:
    path = write_gguf(tiny, tmp_path / "tiny.gguf", metadata={"tokenizer.ggml.add_bos_token": wanted})
    ids = AutoTokenizer.from_pretrained(from_gguf(path))("hello")["input_ids"]
    assert (ids[0] == 1) is wanted


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (GGMLQuantizationType.Q8_0, torch.float16),
        (GGMLQuantizationType.F16, torch.float16),
        (GGMLQuantizationType.BF16, torch.bfloat16),
        (GGMLQuantizationType.F32, torch.float32),
    ],
)
def test_weights_are_stored_in_a_dtype_that_holds_them(
    tiny: Path, tmp_path: Path, kind: GGMLQuantizationType, dtype: torch.dtype
) -> None:
    folder = from_gguf(write_gguf(tiny, tmp_path / "tiny.gguf", kind=kind))
    assert Checkpoint(folder).tensor("model.layers.0.mlp.up_proj.weight").dtype == dtype
    assert json.loads((folder / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


def test_a_file_is_converted_once_and_again_when_it_changes(tiny: Path, tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tiny, tmp_path / "tiny.gguf")
    first = from_gguf(path)
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert from_gguf(path) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    write_gguf(tiny, path, kind=GGMLQuantizationType.F16)
    assert from_gguf(path) != first


def test_what_lies_beside_the_file_is_not_read(tiny: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{")
    assert Checkpoint(from_gguf(write_gguf(tiny, tmp_path / "tiny.gguf"))).config["hidden_size"] == 96


def test_tensors_that_would_be_dropped_are_an_error(tiny: Path, tmp_path: Path, cache: Path) -> None:
    factors = {"rope_freqs.weight": np.ones(16, np.float32)}
    path = write_gguf(tiny, tmp_path / "tiny.gguf", extra=factors)
    with pytest.raises(QtoolError, match="rope_freqs"):
        from_gguf(path)
    assert not list((cache / "gguf").glob("[!.]*"))


def test_missing_tensors_are_an_error(tiny: Path, tmp_path: Path) -> None:
    path = write_gguf(tiny, tmp_path / "tiny.gguf", drop=("blk.1.ffn_up.weight",))
    with pytest.raises(QtoolError, match="would arrive"):
        convert(path, tmp_path / "out")


def test_rope_scaling_that_would_be_lost_is_an_error(tiny: Path, tmp_path: Path) -> None:
    path = write_gguf(tiny, tmp_path / "tiny.gguf", metadata={"llama.rope.scaling.type": "yarn"})
    with pytest.raises(QtoolError, match="'yarn' would be lost"):
        convert(path, tmp_path / "out")


def test_one_part_of_a_split_file_is_an_error(tiny: Path, tmp_path: Path) -> None:
    path = write_gguf(tiny, tmp_path / "tiny.gguf", metadata={"split.count": 2})
    with pytest.raises(QtoolError, match="one of 2 parts"):
        convert(path, tmp_path / "out")


def test_weights_beyond_float16_are_an_error(tiny: Path, tmp_path: Path) -> None:
    norm = {"output_norm.weight": np.full(96, 1e6, np.float32)}
    path = write_gguf(tiny, tmp_path / "tiny.gguf", kind=GGMLQuantizationType.F16, extra=norm)
    with pytest.raises(QtoolError, match=r"model\.norm\.weight has values that are not finite"):
        convert(path, tmp_path / "out")


@pytest.mark.parametrize("keep", [3, 100, 5000, 100_000])
def test_a_truncated_file_is_an_error(tiny: Path, tmp_path: Path, keep: int) -> None:
    path = write_gguf(tiny, tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UsageError, match="truncated or no GGUF file"):
        from_gguf(path)
